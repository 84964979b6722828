"""Types of the names that ``ejax.config`` looks up lazily; ``__init__.py`` has the table."""

from ejax.config.load import load_config as load_config
from ejax.config.load import parse_config as parse_config
from ejax.config.models import AlgorithmConfig as AlgorithmConfig
from ejax.config.models import EnvConfig as EnvConfig
from ejax.config.models import NetworkBlock as NetworkBlock
from ejax.config.models import ObsGroups as ObsGroups
from ejax.config.models import PolicyConfig as PolicyConfig
from ejax.config.models import TrainerConfig as TrainerConfig
from ejax.config.run_config import RunConfig as RunConfig
from ejax.config.run_config import bind as bind
from ejax.schema.problems import ConfigError as ConfigError
from ejax.schema.problems import KeyNote as KeyNote
from ejax.schema.problems import Problem as Problem
