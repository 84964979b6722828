"""Types of the names that ``ejax`` looks up lazily; ``__init__.py`` has the table."""

from ejax.algorithms.apg import APGConfig as APGConfig, apg_update as apg_update
from ejax.algorithms.bc import BCConfig as BCConfig, bc_update as bc_update
from ejax.algorithms.flash_sac import FlashSACConfig as FlashSACConfig, flash_sac_update as flash_sac_update
from ejax.algorithms.grpo import GRPOConfig as GRPOConfig, grpo_update as grpo_update
from ejax.algorithms.options import GradientOptions as GradientOptions, MinibatchOptions as MinibatchOptions
from ejax.algorithms.ppo import PPOConfig as PPOConfig, ppo_update as ppo_update
from ejax.algorithms.record import Algorithm as Algorithm
from ejax.algorithms.reppo import REPPOConfig as REPPOConfig, reppo_update as reppo_update
from ejax.algorithms.sac import SACConfig as SACConfig, sac_update as sac_update
from ejax.algorithms.sgd import MinibatchConfig as MinibatchConfig, sgd_epochs as sgd_epochs
from ejax.algorithms.model_shac import (
    ModelSHACConfig as ModelSHACConfig,
    model_shac_update as model_shac_update,
)
from ejax.algorithms.shac import SHACConfig as SHACConfig, shac_update as shac_update
from ejax.collectors.stateful import BaseAlgorithm as BaseAlgorithm, build_algo as build_algo
from ejax.collectors.buffer import RolloutBuffer as RolloutBuffer, RolloutQueue as RolloutQueue
from ejax.collectors.collect import collect_rollout as collect_rollout
from ejax.config import RunConfig as RunConfig, load_config as load_config, parse_config as parse_config
from ejax.envs.check import check_env as check_env
from ejax.envs.task.world import World as World
from ejax.envs.tasks.mujoco_task import MuJoCoTask as MuJoCoTask
from ejax.envs.wrappers.wrapper import ObservationWrapper as ObservationWrapper
from ejax.evaluation import summarize as summarize
from ejax.learner import GRPO as GRPO, PPO as PPO, SAC as SAC, Learner as Learner
from ejax.optim import (
    OptimizerConfig as OptimizerConfig,
    ScheduleConfig as ScheduleConfig,
    make_optimizer as make_optimizer,
)
from ejax.play.acting import load as load
from ejax.policies.calls import evaluate_actions as evaluate_actions, get_action as get_action, get_value as get_value
from ejax.returns import gae as gae, group_advantages as group_advantages, vtrace as vtrace
from ejax.rollout import make_rollout as make_rollout, reset as reset, unroll as unroll
from ejax.trainer import Trainer as Trainer
from ejax.runtime.tree_text import describe_tree as describe_tree, print_tree as print_tree
from ejax.schema.registry import (
    get_registered_algo_names as get_registered_algo_names,
    get_registered_policy_names as get_registered_policy_names,
    register_algorithm as register_algorithm,
    register_env as register_env,
    register_policy as register_policy,
)
from ejax.training.callbacks import Callback as Callback
from ejax.training.policies import build_policy as build_policy
from ejax.types import (
    Policy as Policy,
    Rollout as Rollout,
    Timestep as Timestep,
    TrainState as TrainState,
    init_train_state as init_train_state,
    make_train_state as make_train_state,
)

# EmbodiChain's names
AlgorithmCfg = GradientOptions
GRPOCfg = GRPOConfig
PPOCfg = PPOConfig
register_algo = register_algorithm

__version__: str
