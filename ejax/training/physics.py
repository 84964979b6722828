"""The physics engine of a run: ``auto`` is settled when the run is built, named in its notes, and kept when it goes on.

``resolved.json`` keeps the word ``auto``, so that a policy can be evaluated where another engine is at hand; what it
meant is in the config of each checkpoint. A run that goes on keeps that engine on whatever device: engines agree within
tolerances only, and a change would be a step in the run's curves that nothing explains.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ejax.config import ConfigError, Problem, RunConfig
from ejax.envs.host.calls import call_env
from ejax.envs.mujoco.choice import Engine, choose_engine, how_to_install
from ejax.logs.json_records import read_facts
from ejax.schema.frozen import freeze, thaw, with_value
from ejax.schema.registry import resolve
from ejax.store.checkpoint import CheckpointMeta
from ejax.store.run_dir import RunDirectory


def settle_physics(
    config: RunConfig, begun_with: Engine | None = None, *, platform: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with a named engine for ``physics: auto``, and a note of which and why. Idempotent.

    Args:
        begun_with: the engine of the checkpoint that a run goes on from.
        platform: to decide for; see ``choose_engine``.

    Raises:
        ConfigError: the engine is not installed, or not for this task on this device.
    """
    env = config.env
    path, given, sensing = _find_engine(env.id, env.cfg)
    if given is None:
        return config, ()
    try:
        engine, why = choose_engine(given, platform, sensing=sensing)
    except ValueError as error:
        raise ConfigError([Problem(f"env.cfg.{'.'.join(path)}", str(error))]) from error
    notes = (f"physics: {engine}, since {why}",) if given == "auto" else ()
    if given == "auto" and begun_with not in (None, engine):
        notes = (f"physics: {begun_with}, as the run was begun; auto means {engine} here, since {why}",)
        engine = cast(Engine, begun_with)
    if how := how_to_install(engine):
        text = f"'{given}' is {engine} here" if given == "auto" else f"got '{engine}'"
        raise ConfigError([Problem(f"env.cfg.{'.'.join(path)}", f"{text}, which is not installed: {how}")])
    if given != "auto":
        return config, ()
    cfg = freeze(with_value(thaw(env.cfg), ".".join(path), engine))
    return config.model_copy(update={"env": env.model_copy(update={"cfg": cfg})}), notes


def engine_of(checkpoint: Path, directory: RunDirectory) -> Engine | None:
    """The engine that a checkpoint was made with; None: unknown, or no environment of such.

    Checkpoints that still say ``auto`` are of an ejax in which it meant ``mujoco`` on a CPU and else ``mjx``.
    """
    env = read_facts(checkpoint / "meta.json", CheckpointMeta).get("config", {}).get("env")
    engine = _find_engine(env["id"], env["cfg"])[1] if env else None
    if engine != "auto":
        return engine
    device = directory.versions().get("device")
    return None if device is None else "mujoco" if device.startswith("cpu") else "mjx"


def _find_engine(name: str, cfg: Mapping[str, Any]) -> tuple[tuple[str, ...], Engine | None, bool]:
    """Where in an environment's ``cfg`` the engine is named, its name, and whether the task reads contact sensors.

    None: the environment has no such argument.
    """
    try:
        make, parameters = call_env(name, "make", lambda: _with_parameters(resolve("env", name)))
    except (ImportError, TypeError, ValueError):
        return (), None, False  # whoever builds the environment says what is wrong with it
    if "physics" in parameters:
        sensing = bool(getattr(make, "senses_contacts", False))
        return ("physics",), cfg.get("physics", parameters["physics"].default), sensing
    if "env_cfg" in parameters and isinstance(cfg.get("env"), str):  # an environment that wraps another
        path, engine, sensing = _find_engine(cfg["env"], cfg.get("env_cfg") or {})
        return ("env_cfg", *path), engine, sensing
    return (), None, False


def _with_parameters(make: Any) -> tuple[Any, Mapping[str, inspect.Parameter]]:
    return make, inspect.signature(make).parameters
