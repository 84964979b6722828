"""The sections of a run's config in their one canonical form; ``spellings`` turns every other form into it.

Keys and defaults are EmbodiChain's unless a comment notes another. All models are frozen, hashable, and
refuse unknown keys.
"""

import json
import math
import re
from functools import partial
from typing import Annotated, Any, Literal

from flax.core import FrozenDict
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ejax.algorithms.record import Algorithm, find_algorithm
from ejax.config.collector import CollectorConfig
from ejax.envs.randomization.names import KINDS, modes_of
from ejax.policies.memory_config import MemoryConfig
from ejax.policies.mlp import NetworkConfig
from ejax.policies.record import PolicyKind, find_policy
from ejax.policies.vla.config import VLAConfig
from ejax.runtime.device import MatmulPrecision
from ejax.schema.frozen import ANY_CASE, Kwargs, MayChange, PathText, StrictModel, freeze, thaw
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.registry import WRAPPERS, trusted_name
from ejax.schema.values import INT64_MAX
from ejax.types import CameraView, Phase

MAX_NAME_BYTES = 180
"""Bytes of ``exp_name``: most file systems take 255 for a name, and a checkpoint's has the step in it too."""
CHUNK = "ActionChunk"
Vector = tuple[float, float, float]
EVAL_METRICS = ("eval/avg_reward", "eval/avg_length", "eval/success_rate")


def _wrapper(entry: Any) -> FrozenDict:
    entry = {entry: {}} if isinstance(entry, str) else entry
    if not isinstance(entry, dict | FrozenDict) or len(entry) != 1:
        raise ValueError(f"got {short_repr(entry)}; must be one {{name: arguments}}, such as {{AsymmetricEnv: {{}}}}")
    ((name, cfg),) = entry.items()
    if not isinstance(cfg, dict | FrozenDict | None):
        raise ValueError(f"got {short_repr(cfg)} for {name}; must be a mapping of its arguments to values")
    return FrozenDict({trusted_name("wrapper", name): freeze(cfg or {})})


_Wrapper = Annotated[
    FrozenDict,
    PlainValidator(_wrapper),
    PlainSerializer(thaw),
    WithJsonSchema({"type": "object", "minProperties": 1, "maxProperties": 1}),
]


class EnvConfig(StrictModel):
    """``env``: which environment, its constructor's arguments, and what is wrapped around it."""

    id: Annotated[str, AfterValidator(partial(trusted_name, "env"))]
    """A registered name, ``<family>:<name>`` such as ``gymnax:CartPole-v1``, or ``package.module:Name``."""
    cfg: Kwargs = Field(default_factory=FrozenDict)
    """Arguments of the environment's constructor."""
    wrappers: Annotated[tuple[_Wrapper, ...], BeforeValidator(lambda x: tuple(x) if isinstance(x, list) else x)] = ()
    """Wrappers around it, the outermost last: ``{name: arguments}`` each, such as ``{AsymmetricEnv: {}}``. A name is a
    registered one, or ``package.module:Name``."""

    @model_validator(mode="before")
    @classmethod
    def _unwrapped(cls, data: Any) -> Any:
        return unwrapped_env(data)

    @property
    def layers(self) -> tuple[tuple[str, FrozenDict], ...]:
        """Return (name, arguments) of each wrapper, the outermost last."""
        return tuple(item for wrapper in self.wrappers for item in wrapper.items())

    @property
    def action_chunk(self) -> int:
        """Return the actions of one decision."""
        sizes = [self.cfg.get("action_chunk", 1), *(cfg.get("size") for name, cfg in self.layers if name == CHUNK)]
        return math.prod(size for size in sizes if type(size) is int)  # another is reported with its key


def unwrapped_env(env: Any) -> Any:
    """Turn a wrapper that names its environment in ``cfg.env``, as before ``wrappers``, into that environment and the
    wrapper around it."""
    if not isinstance(env, dict) or not isinstance(name := env.get("id"), str) or not isinstance(env.get("cfg"), dict):
        return env
    cfg = dict(env["cfg"])
    if env.get("wrappers") and isinstance(cfg.get("env_cfg"), dict):  # by an override of the former key
        inner = cfg.pop("env_cfg")
        return {**env, "cfg": cfg | inner}
    wrapper = next((known for known in WRAPPERS if known.casefold() == name.casefold()), None)
    if wrapper is None or not isinstance(cfg.get("env"), str):
        return env
    inner = unwrapped_env({"id": cfg.pop("env"), "cfg": cfg.pop("env_cfg", None) or {}})
    wrappers = list(inner.get("wrappers", ()))
    # options of RenderedEnv that are wrappers now
    if events := cfg.pop("events", None):
        wrappers.append({"RandomizedEnv": {"events": events}})
    if (size := cfg.pop("action_chunk", 1)) != 1:
        wrappers.append({CHUNK: {"size": size}})
    return {**inner, "wrappers": [*wrappers, {wrapper: cfg}, *env.get("wrappers", ())]}


class EventConfig(StrictModel):
    """``trainer.events.<phase>.<name>``: what differs between environments, or changes the world, and when.

    Of ``ejax.envs.randomization.names.KINDS`` (docs/randomization.md), or a functor (``ejax.envs.terms.events``).
    """

    func: str
    """An event functor's name, or ``package.module:function``."""
    mode: Literal["startup", "reset", "interval"] = Field(default="interval", validate_default=True)
    """``modes_of`` names those that a function takes, and its default."""
    interval_step: PositiveInt = 1
    """Counted from the start of an episode."""
    params: Kwargs = Field(default_factory=FrozenDict)
    """Arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _default_mode(cls, data: Any) -> Any:
        func = data.get("func") if isinstance(data, dict) else None
        if isinstance(func, str) and func in KINDS and data.get("mode") is None:
            return {**data, "mode": modes_of(func)[0]}
        return data

    @field_validator("mode", mode="before")
    @classmethod
    def _allowed(cls, mode: Any, info: ValidationInfo) -> Any:
        func = info.data.get("func")
        if func in KINDS:
            from ejax.envs.randomization.draws import check_choice  # most runs have no events

            check_choice(f"mode of {func}", mode, modes_of(func))
        return mode


Events = Annotated[
    dict[str, EventConfig],
    AfterValidator(freeze),
    PlainSerializer(lambda events: {name: event.model_dump(mode="json") for name, event in events.items()}),
]


class EventsConfig(StrictModel):
    """``trainer.events``: what happens to the world besides the environment's own events, in each phase."""

    train: Events = Field(default_factory=dict, validate_default=True)
    """While the policy learns."""
    eval: MayChange[Events] = Field(default_factory=dict, validate_default=True)
    """In evaluations, their videos and ``ejax evaluate``."""

    def of(self, phase: Phase) -> FrozenDict:
        """Return the events of one phase, in the form of a gym config's ``env.events``."""
        return freeze({name: dict(event) for name, event in getattr(self, phase).items()})


class CameraConfig(StrictModel):
    """``params`` of ``record_camera_data_async``."""

    phase: Phase = "eval"
    """The recorded policy: ``eval`` the distribution's mode in the evaluation's environment, ``train`` its samples in
    the training's; the section of ``events`` that the event is in."""
    name: str = "cam"
    """Part of the videos' file names."""
    resolution: tuple[PositiveInt, PositiveInt] = (640, 480)
    """(width, height) of one environment's picture."""
    eye: Vector = (-1.4, 1.4, 2.0)
    """Position of the camera, m, in the world."""
    target: Vector = (0.0, 0.0, 0.0)
    """The point that it looks at, m."""
    up: Vector = (0.0, 0.0, 1.0)
    """Direction that points up in the picture; without effect where the camera looks along it."""
    intrinsics: tuple[float, float, float, float] | None = None
    """(fx, fy, cx, cy) in pixels, from the upper left corner. None: (600, 600, w/2, h/2)."""
    max_env_num: PositiveInt = 16
    """Environments in the video, side by side."""
    save_path: PathText | None = None
    """Folder, in which no video replaces another. None: ``videos/<phase>`` in the run's folder."""
    interval_step: PositiveInt = 1
    """Every how many steps a frame is taken; the event's key of this name."""

    @property
    def view(self) -> CameraView:
        width, height = self.resolution
        fx, fy, cx, cy = self.intrinsics or (600.0, 600.0, width / 2.0, height / 2.0)
        fovx, fovy = (math.degrees(2.0 * math.atan(size / (2.0 * f))) for size, f in ((width, fx), (height, fy)))
        center = (cx / width, cy / height)
        return CameraView(self.eye, self.target, fovy, effects=False, up=self.up, fovx=fovx, center=center)

    @model_validator(mode="after")
    def _sees_something(self) -> "CameraConfig":
        if self.eye == self.target:
            raise ValueError(f"eye and target are both {self.eye}; set target to a point to look at")
        if self.intrinsics is not None and not min(self.intrinsics[:2]) > 0.0:
            raise ValueError(f"intrinsics {self.intrinsics}: fx and fy must be > 0, in pixels")
        return self


class ProfileConfig(StrictModel):
    """``trainer.profile``: which updates are traced, by ``jax.profiler``."""

    start: NonNegativeInt = 5
    """Updates before the trace begins; of a resumed run, those before the resume count too."""
    updates: PositiveInt = 2
    """Updates in the trace. A trace of many is too large to look at."""


class TrainerConfig(StrictModel):
    """``trainer``. The defaults are those of the ``learning_env`` path; a ``gym_config`` brings its own."""

    exp_name: str
    """Part of the output folder's name. Default: ``<env>_<algorithm>``."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Decides every random number of the run: the same seed gives the same bits."""
    device: MayChange[str] = "cpu"
    """``cpu``, ``cuda``, ``cuda:<index>``, ``tpu``."""
    matmul_precision: MatmulPrecision = "float32"
    """``float32``, ``tf32``, ``bf16``: how a GPU multiplies float32 matrices. The latter two round their entries, to 10
    and 7 bits of mantissa, and add up in float32. With ``bf16`` the hidden layers of MLPs are also kept in bfloat16.
    Parameters, gradients and statistics are float32 in any case, and a CPU computes in float32 only."""
    distributed: MayChange[bool] = False
    """Train on all devices of ``device``'s kind: of this machine, or of all processes that were started together
    (``--coordinator``, SLURM, OpenMPI, Kubernetes). As in EmbodiChain, ``num_envs`` and ``batch_size`` are then those
    of one device, and the run has as many environment steps more as there are devices more."""
    shard_parameters: MayChange[bool | Annotated[int, Field(ge=2)]] = False
    """With ``distributed``: each device keeps a part of the parameters and of the optimizer's moments (FSDP), for
    policies that do not fit on one. What a layer needs is gathered when it is its turn. ``true``: all devices share one
    copy; a number: so many neighbours do, such as the devices of one machine, and others have other copies."""
    process_timeout_s: MayChange[PositiveFloat] = 300.0
    """Seconds after which one of several processes that has not followed the others counts as hanging: they end."""
    num_envs: PositiveInt = 64
    """Environments that are stepped side by side, N; with ``distributed`` on each device."""
    buffer_size: PositiveInt = 256
    """Steps per environment and update, T."""
    iterations: MayChange[PositiveInt] = 250
    """Updates of the run, unless ``total_timesteps`` is given."""
    total_timesteps: MayChange[Annotated[PositiveInt, Field(le=INT64_MAX)] | None] = None
    """Environment steps of the run, rounded up to whole updates."""
    init_at_random_ep_len: bool = False
    """ejax: the first episodes begin as if a random part of their time limit were over, so that not all environments
    reset together from then on. RSL-RL's name. Of environments inside the program."""
    normalize_reward: bool = False
    """ejax: updates see rewards divided by the deviation of their discounted returns so far, at most ±10; what is
    logged and evaluated is as it comes. ``norm_reward`` of Stable-Baselines3's ``VecNormalize``."""

    enable_eval: MayChange[bool] = False
    """Evaluate the policy's mode in complete episodes, every ``eval_freq`` steps and at the end, and keep the best
    checkpoint."""
    eval_freq: MayChange[Annotated[NonNegativeInt, Field(le=INT64_MAX)]] = 0
    """Environment steps between evaluations; 0: none during training."""
    num_eval_envs: MayChange[PositiveInt] = 16
    """Environments of an evaluation, side by side."""
    num_eval_episodes: MayChange[NonNegativeInt] = 5
    """Episodes of an evaluation, at least 1 with ``enable_eval``."""
    eval_episode_choice: MayChange[Literal["fixed", "first_finished"]] = "fixed"
    """ejax: which episodes count. ``first_finished`` is EmbodiChain's choice, which favours short ones."""
    eval_seed: Annotated[int, Field(ge=0, lt=2**33)]
    """Default: ``seed`` + 10000."""
    best_eval_metric: MayChange[str] = "eval/avg_reward"
    """``eval/avg_reward``, ``eval/avg_length``, ``eval/success_rate``, or the environment's ``eval/metrics/<name>``."""
    best_eval_mode: MayChange[Literal["max", "min"]] = "max"
    """``max``: the best has the largest ``best_eval_metric``; ``min``: the smallest."""
    final_eval_episodes: MayChange[NonNegativeInt | Literal["auto"] | None] = "auto"
    """ejax: fresh episodes, rounded up to whole evaluations, in which a finished run's best checkpoint and its last are
    evaluated again: what is reported of it. ``auto``: ``num_eval_episodes``; 0 or null: none."""

    save_freq: MayChange[Annotated[NonNegativeInt, Field(le=INT64_MAX)]] = 0
    """Environment steps between checkpoints; 0: only the last one and the best."""
    save_frequency_updates: MayChange[NonNegativeInt] = 0
    """Updates between checkpoints; both frequencies may be given."""
    keep_checkpoints: MayChange[PositiveInt] = 3
    """ejax: how many periodic checkpoints stay on disk, besides the best and the last."""
    output_dir: MayChange[PathText] = "outputs"
    """ejax: the folder that runs are written under."""
    collector: CollectorConfig = CollectorConfig()
    """Placement and timing of rollouts."""
    events: EventsConfig = EventsConfig()
    """Events in the world besides the environment's own."""
    cameras: MayChange[tuple[CameraConfig, ...]] = ()
    """ejax: videos; written as ``events.<phase>.<name>`` with func ``record_camera_data_async``."""
    use_wandb: MayChange[bool] = False
    """Log to Weights & Biases too; needs the extra ``wandb``."""
    wandb_project_name: MayChange[str] = "embodichain-generic"
    """Project of Weights & Biases."""
    log_freq_updates: MayChange[PositiveInt] = 1
    """ejax: updates between two fetches of the metrics."""
    updates_per_dispatch: MayChange[PositiveInt | Literal["auto"]] = "auto"
    """ejax: updates in one call of the compiled program."""
    console: MayChange[bool] = True
    """ejax: progress on the terminal."""
    profile: MayChange[ProfileConfig | None] = None
    """ejax: trace some updates into the run's ``profile`` folder. ``{}`` takes the defaults."""

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        if self.total_timesteps is None:
            return self.iterations
        return math.ceil(self.total_timesteps / (self.buffer_size * self.num_envs))

    @field_validator(
        *("seed", "num_envs", "buffer_size", "iterations", "total_timesteps"),
        *("eval_freq", "num_eval_envs", "num_eval_episodes", "eval_seed", "save_freq", "save_frequency_updates"),
        "final_eval_episodes",
        mode="before",
    )
    @classmethod
    def _whole_numbers(cls, value: Any) -> Any:
        # JSON's 1e4 is a float, which EmbodiChain turns into an int
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @field_validator("exp_name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name.strip() or "/" in name or "\\" in name:
            raise ValueError(f"got '{name}'; must be part of a folder's name, without slashes")
        if not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"got {short_repr(name)}; must be printable, and of at most {MAX_NAME_BYTES} bytes")
        return name

    @field_validator("device")
    @classmethod
    def _names_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"(cpu|cuda|tpu)(:\d+)?", device):
            raise ValueError(f"got '{device}'; allowed: cpu, cuda, cuda:<index>, tpu, tpu:<index>")
        return device

    @field_validator("best_eval_metric")
    @classmethod
    def _known_metric(cls, name: str) -> str:
        if name in EVAL_METRICS or (name.startswith("eval/metrics/") and name != "eval/metrics/"):
            return name
        allowed = f"{', '.join(EVAL_METRICS)}, eval/metrics/<name>"
        raise ValueError(f"got '{name}'; allowed: {allowed}{did_you_mean(name, EVAL_METRICS)}")


class NetworkBlock(StrictModel):
    """``policy.actor`` and ``policy.critic``."""

    type: Annotated[Literal["mlp"], ANY_CASE] = "mlp"
    """Kind of the network: a multi-layer perceptron."""
    network_cfg: NetworkConfig
    """Its layers."""
    memory: MemoryConfig | None = None
    """ejax: a memory before the network. The actor's default is none; the critic's is a second one like the
    actor's."""


class ObsGroups(StrictModel):
    """Parts of a nested observation that each network reads, by dotted path, in this order; empty: all.

    A critic that is not given reads what the actor does."""

    actor: tuple[str, ...] = ()
    """Dotted paths of the parts that the actor reads."""
    critic: tuple[str, ...] = ()
    """Dotted paths of the parts that the critic reads."""


class PolicyConfig(StrictModel):
    """``policy``."""

    name: Annotated[str, AfterValidator(partial(trusted_name, "policy"))]
    """``actor_critic``, ``actor_only``, ``vision``, ``vla``, ``pi0``, ``smolvla``, or your class,
    ``package.module:Name``."""
    cfg: Kwargs = Field(default_factory=FrozenDict)
    """Arguments of your policy class."""
    action_dim: PositiveInt | None = None
    """Checked against the environment's."""
    actor: NetworkBlock | None = None
    """The network from observations to actions. ``actor_critic`` and ``actor_only`` need it."""
    critic: NetworkBlock | None = None
    """The network from observations to values. ``actor_critic`` needs it."""
    initial_log_std: float = 0.0
    """The first log standard deviation of every action, in ``log_std_range``. It does not depend on the
    observation."""
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    """The range in which log_std is learned; ejax's key, with the bounds that EmbodiChain had up to 0.2."""
    squash_actions: bool = False
    """ejax: a tanh-squashed Gaussian between the bounds of the action space, instead of an unbounded one."""
    actor_obs_normalization: bool = False
    """The actor sees observations minus their running mean, divided by their running deviation."""
    critic_obs_normalization: bool = False
    """The same for the critic, with separate statistics."""
    obs_groups: ObsGroups = ObsGroups()
    """Parts of a nested observation that each network reads."""
    vla_config: VLAConfig | None = None
    """Options of the policies ``vla``, ``pi0`` and ``smolvla``."""
    init_from: PathText | None = None
    """ejax: the policy to start from: a checkpoint's folder, a run's (its best checkpoint), the name of a policy that
    comes with ejax, or EmbodiChain's file ``….pt``. Optimizer and step count start from zero."""

    @property
    def record(self) -> PolicyKind:
        """Record of the policy that the name means."""
        return find_policy(self.name)

    @property
    def memories(self) -> dict[str, MemoryConfig]:
        """Arguments ``actor_memory`` and ``critic_memory`` of a policy class; empty where nothing remembers."""
        if self.actor is None or self.actor.memory is None:
            return {}
        if self.critic is None or not self.record.has_critic:
            return {"actor_memory": self.actor.memory}
        return {"actor_memory": self.actor.memory, "critic_memory": self.critic.memory or self.actor.memory}


class AlgorithmConfig(StrictModel):
    """``algorithm``: a name, and the options that this name has."""

    name: Annotated[str, AfterValidator(partial(trusted_name, "algorithm"))]
    """``ppo``, ``grpo``, ``reppo``, ``sac``, ``flash_sac``, ``apg``, ``shac``, ``model_shac``, ``bc``, ``distill``, or
    a record of your own, ``package.module:ALGORITHM``."""
    cfg: SerializeAsAny[BaseModel] = Field(default_factory=dict, validate_default=True)
    """The algorithm's options; each name has its own."""

    @field_validator("cfg", mode="plain")
    @classmethod
    def _options(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("name")
        if name is None:  # an unknown name is reported with its key
            return value
        try:
            options = find_algorithm(name).Config
        except (ImportError, TypeError) as error:  # the latter: a relative name
            raise ValueError(f"'{name}' cannot be imported: {error}") from error
        return value if isinstance(value, options) else options.model_validate_json(json.dumps(value), strict=True)

    @property
    def record(self) -> Algorithm:
        """Record of the algorithm that the name means."""
        return find_algorithm(self.name)
