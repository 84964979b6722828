"""From a config to the environment that it names: pure, or outside JAX and guarded.

``physics: auto`` is resolved when a run is built and kept when it continues, on any device. ``resolved.json`` keeps the
word ``auto``, so that a policy can be evaluated with another engine; a checkpoint's config has the engine's name.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from flax.core import FrozenDict

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.models import unwrapped_env
from ejax.envs.host.calls import call_env
from ejax.envs.mujoco.choice import Engine, choose_engine, how_to_install
from ejax.envs.randomization.names import split_events
from ejax.envs.wrappers.placing import FIELD, add_events, for_evaluation, why_none, with_functor_events, wrap
from ejax.logs.json_records import read_facts
from ejax.schema.frozen import with_value
from ejax.schema.messages import explain
from ejax.schema.paths import leaves, nest
from ejax.schema.registry import import_entry, is_import_path, resolve
from ejax.store.checkpoint import CheckpointMeta
from ejax.types import Env, HostEnv, Phase, Policy, PyTree

_CODE = {
    "check": "ejax.envs.check:check_shapes",
    "guard": "ejax.envs.host.guarded:GuardedEnv",
    "vectorize": "ejax.envs.adapters.gymnasium:vectorize",
}
"""Modules that an environment of ejax's in JAX does not need, and so does not import."""


@dataclass(frozen=True)
class UserObjects:
    """Objects that take the place of those that a config names."""

    env: Any
    """An ``Env``, a ``HostEnv``, or a vector environment of Gymnasium's."""
    policy: Policy
    eval_env: Any = None
    """To evaluate in; None: ``env``, which lives inside the program then."""


def build_env(
    config: RunConfig,
    *,
    phase: Phase = "train",
    num_envs: int | None = None,
    quarantine: Path = Path("quarantine"),
    for_spaces: bool = False,
) -> Env | HostEnv:
    """Make the environment that ``config.env`` names, with the phase's ``trainer.events``.

    ``num_envs`` are rows of a host environment; None: ``trainer.num_envs``. What breaks one goes into ``quarantine``.
    ``for_spaces``: it is not stepped, and may have another number of rows.

    Raises:
        ConfigError: its constructor refuses the arguments, or its physics engine is not installed.
    """
    config, _ = resolve_physics(config)
    trainer = config.trainer
    num_rows = trainer.num_envs if num_envs is None else num_envs
    options = dict(config.env.cfg)
    randomizers, others = split_events(trainer.events.of(phase))
    if others:
        inside = with_functor_events(config.env.id, options, others)
        if inside is None:
            raise ConfigError([Problem(f"trainer.events.{phase}", why_none(config.env.id))])
        options = inside
    layers = config.env.layers
    make = partial(make_env, config.env.id, options, num_envs=num_rows, wrappers=layers, events=randomizers)
    try:
        env = call_env(config.env.id, "make", make)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("env.cfg", f"{config.env.id} refuses it: {explain(error)}")]) from error
    if not isinstance(env, HostEnv):
        return for_evaluation(env) if phase == "eval" else env
    if env.num_envs != num_rows and not for_spaces:  # a user's task may have ignored it
        call_env(config.env.id, "close", env.close)
        text = f"{config.env.id} has {env.num_envs} environments instead of {num_rows}; let it take num_envs"
        raise ConfigError([Problem("env.id", text)])
    return _guarded(config, env, make, trainer.collector.max_env_restarts, quarantine)


def adopt_env(config: RunConfig, env: Any, *, num_envs: int, quarantine: Path) -> Env | HostEnv:
    """Take an environment that is built already; one outside JAX is guarded, and closed at the end.

    ConfigError: not ``num_envs`` rows of a host environment, or a single environment of Gymnasium's kind.
    """
    if isinstance(env, gymnasium.Env):
        text = f"got one {type(env).__name__}; pass a vector environment, such as gymnasium.make_vec(...)"
        raise ConfigError([Problem("env", text)])
    env = _vectorized(env, lambda: env, num_envs)
    if not isinstance(env, HostEnv):
        return cast(Env, env)
    if env.num_envs != num_envs:
        text = f"got {num_envs}, but the environment that was given has {env.num_envs}; use {env.num_envs}"
        raise ConfigError([Problem("trainer.num_envs", text)])
    return _guarded(config, env, lambda: env, 0, quarantine)  # what is not known by name is not made again


def adopt_envs(config: RunConfig, objects: UserObjects, *, num_envs: int, quarantine: Path) -> tuple[Any, Any]:
    """Take the environments to train and to evaluate in (None: the same), each with its phase's events.

    ConfigError: options that one cannot have.
    """
    trainer, events = config.trainer, config.trainer.events
    env: Env | HostEnv = adopt_env(config, objects.env, num_envs=num_envs, quarantine=quarantine)
    if not isinstance(env, HostEnv):
        same = objects.eval_env is None and events.train == events.eval
        evaluated = env if objects.eval_env is None else objects.eval_env
        return _with_events(config, env, "train"), None if same else _with_events(config, evaluated, "eval")
    if events.train or events.eval:
        text = "act inside JAX, and the environment that was given is stepped outside it; let it make its own"
        raise ConfigError([Problem("trainer.events", text)])
    if trainer.collector.num_groups > 1:
        text = f"got {trainer.collector.num_groups}, but one environment was given; use 1, or a config that names it"
        raise ConfigError([Problem("trainer.collector.num_groups", text)])
    if not trainer.enable_eval:
        return env, None
    if objects.eval_env is None:
        text = "got true, but an environment outside JAX cannot be evaluated in while it trains; pass eval_env as well"
        raise ConfigError([Problem("trainer.enable_eval", text)])
    rows = objects.eval_env.num_envs
    return env, adopt_env(config, objects.eval_env, num_envs=rows, quarantine=quarantine / "eval")


def _with_events(config: RunConfig, env: Any, phase: Phase) -> Any:
    section = f"trainer.events.{phase}"
    try:
        return add_events(env, config.trainer.events.of(phase))
    except ConfigError as error:
        problems = [Problem(f"{section}.{key.removeprefix(f'{FIELD}.')}", text) for key, text in error.problems]
        raise ConfigError(problems) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem(section, str(error))]) from error


def _guarded(config: RunConfig, env: HostEnv, make: Any, max_restarts: int, quarantine: Path) -> HostEnv:
    guarded: HostEnv = import_entry(_CODE, "guard")(
        env,
        make,
        recipe=config.env.model_dump(mode="json"),
        folder=quarantine,
        max_quarantined=config.trainer.collector.max_quarantined,
        max_restarts=max_restarts,
    )
    return guarded


def check_own_env(config: RunConfig, env: Any) -> None:
    """Check an environment in JAX that is not ejax's, by shapes; ConfigError names the leaves that do not fit."""
    own = [is_import_path("wrapper", name) for name, _ in config.env.layers]
    if isinstance(env, HostEnv) or not any([is_import_path("env", config.env.id), *own]):
        return
    try:
        import_entry(_CODE, "check")(env)
    except ConfigError as error:
        problems = [Problem("env.id", f"{config.env.id}: {key}: {text}") for key, text in error.problems]
        raise ConfigError(problems) from error


def evaluation_env(config: RunConfig, env: Any, given: Any = None) -> Any:
    """Choose the environment to evaluate in: ``given``, else ``env`` as ``for_evaluation`` makes it, or another one if
    the phases' events differ."""
    if given is not None:
        return given
    events = config.trainer.events
    return for_evaluation(env) if events.train == events.eval else build_env(config, phase="eval")


def make_env(
    name: str,
    cfg: Mapping[str, Any],
    *,
    num_envs: int,
    wrappers: Iterable[tuple[str, Mapping[str, Any]]] = (),
    events: Mapping[str, Any] = FrozenDict(),
) -> Any:
    """Make ``name(**cfg)``: an ``Env``, or a ``HostEnv`` of ``num_envs`` rows, as one of Gymnasium's kind becomes.

    ``action_chunk`` in ``cfg`` wraps a pure environment that does not take it itself, as ``wrappers``, (name,
    arguments) each, do.
    """
    make = resolve("env", name)
    parameters = inspect.signature(make).parameters
    options, size = dict(cfg), 1
    if "action_chunk" not in parameters:
        size = options.pop("action_chunk", 1)
    # a host environment has its rows from the start
    options |= {"num_envs": num_envs} if "num_envs" in parameters else {}
    make_one = partial(make, **options)
    return wrap(_vectorized(make_one(), make_one, num_envs), wrappers, events, size)


def _vectorized(made: Any, make_one: Callable[[], Any], num_envs: int) -> Any:
    """Make a ``HostEnv`` of an environment of Gymnasium's kind; others stay as they are."""
    if not isinstance(made, gymnasium.Env | gymnasium.vector.VectorEnv):
        return made
    return import_entry(_CODE, "vectorize")(made, make_one, num_envs)


def sample_obs(env: Env | HostEnv, num_rows: int) -> PyTree:
    """Make zeros in the form of ``num_rows`` observations."""
    parts = leaves(env.observation_space)
    return nest((path, np.zeros((num_rows, *space.shape), np.float32)) for path, space in parts)


def resolve_physics(
    config: RunConfig, begun_with: Engine | None = None, *, platform: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Name an engine for ``physics: auto``; the config with it, and a note of which and why. Idempotent.

    Args:
        begun_with: the engine of the checkpoint that a run continues from.
        platform: to decide for; see ``choose_engine``.

    Raises:
        ConfigError: the engine is not installed.
    """
    env = config.env
    given = _find_engine(env.id, env.cfg)
    if given is None:
        return config, ()
    engine, why = choose_engine(given, platform)
    notes: tuple[str, ...] = (f"physics: {engine}, since {why}",) if given == "auto" else ()
    if given == "auto" and begun_with not in (None, engine):
        notes = (f"physics: {begun_with}, as the run was begun; auto means {engine} here, since {why}",)
        engine = cast(Engine, begun_with)
    if how := how_to_install(engine):  # found now, not in the middle of building
        text = f"'{given}' is {engine} here" if given == "auto" else f"got '{engine}'"
        raise ConfigError([Problem("env.cfg.physics", f"{text}, which is not installed: {how}")])
    if engine == "warp" and platform is None and config.trainer.device.startswith("cuda"):
        notes += (f"XLA_FLAGS: {os.environ.get('XLA_FLAGS', 'none')}",)  # ``device_problem`` adds Warp's
    return (config if given != "auto" else with_engine(config, engine)), notes


def with_engine(config: RunConfig, engine: Engine) -> RunConfig:
    """Name another physics engine in a config. ConfigError: its environment does not choose one by ``physics``."""
    env = config.env
    if _find_engine(env.id, env.cfg) is None:
        text = f"{env.id} has no argument physics: ejax does not step it by one of its MuJoCo engines"
        raise ConfigError([Problem("env.id", text)])
    return with_value(config, "env.cfg.physics", engine)


def engine_of(checkpoint: Path) -> Engine | None:
    """Read the engine that a checkpoint was made with; None: no environment that has one."""
    env = unwrapped_env(read_facts(checkpoint / "meta.json", CheckpointMeta).get("config", {}).get("env"))
    return _find_engine(env["id"], env["cfg"]) if env else None


def _find_engine(name: str, cfg: Mapping[str, Any]) -> Engine | None:
    """Find the engine that an environment steps its physics by. None: it does not choose one by ``physics``."""
    try:
        make = call_env(name, "make", resolve, "env", name)
        parameters = call_env(name, "make", inspect.signature, make).parameters
    except (ImportError, TypeError, ValueError):
        return None  # building the environment will report what is wrong with it
    return cfg.get("physics", parameters["physics"].default) if "physics" in parameters else None
