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
from ejax.frozen import freeze, thaw
from ejax.registry import resolve
from ejax.training.checkpoint import CheckpointMeta
from ejax.training.facts import read_facts
from ejax.training.run_dir import RunDirectory


def settle_physics(
    config: RunConfig, begun_with: Engine | None = None, *, platform: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The config with a named engine for ``physics: auto``, and a note of which and why. Idempotent.

    Args:
        begun_with: the engine of the checkpoint that a run goes on from.
        platform: to decide for; see ``choose_engine``.

    Raises:
        ConfigError: the engine is not installed.
    """
    env = config.env
    path, given = _find_engine(env.id, env.cfg)
    if given is None:
        return config, ()
    engine, why = choose_engine(given, platform)
    notes = (f"physics: {engine}, since {why}",) if given == "auto" else ()
    if given == "auto" and begun_with not in (None, engine):
        notes = (f"physics: {begun_with}, as the run was begun; auto means {engine} here, since {why}",)
        engine = cast(Engine, begun_with)
    if how := how_to_install(engine):
        text = f"'{given}' is {engine} here" if given == "auto" else f"got '{engine}'"
        raise ConfigError([Problem(f"env.cfg.{'.'.join(path)}", f"{text}, which is not installed: {how}")])
    if given != "auto":
        return config, ()
    cfg = freeze(_with(thaw(env.cfg), path, engine))
    return config.model_copy(update={"env": env.model_copy(update={"cfg": cfg})}), notes


def engine_of(checkpoint: Path, directory: RunDirectory) -> Engine | None:
    """The engine that a checkpoint was made with; None: unknown, or no environment of such.

    Checkpoints that still say ``auto`` are of an ejax in which it meant ``mujoco`` on a CPU and else ``mjx``.
    """
    env = read_facts(checkpoint / "meta.json", CheckpointMeta).get("config", {}).get("env")
    engine = _find_engine(env["id"], env["cfg"])[1] if env else None
    if engine != "auto":
        return engine
    device = directory.device()
    return None if device is None else "mujoco" if device.startswith("cpu") else "mjx"


def _find_engine(name: str, cfg: Mapping[str, Any]) -> tuple[tuple[str, ...], Engine | None]:
    """Where in an environment's ``cfg`` the engine is named, and its name; None: it has no such argument."""
    try:
        parameters = call_env(name, "make", lambda: inspect.signature(resolve("env", name)).parameters)
    except (ImportError, TypeError, ValueError):
        return (), None  # whoever builds the environment says what is wrong with it
    if "physics" in parameters:
        return ("physics",), cfg.get("physics", parameters["physics"].default)
    if "env_cfg" in parameters and isinstance(cfg.get("env"), str):  # an environment that wraps another
        path, engine = _find_engine(cfg["env"], cfg.get("env_cfg") or {})
        return ("env_cfg", *path), engine
    return (), None


def _with(cfg: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**cfg, first: _with(cfg.get(first) or {}, tuple(rest), value) if rest else value}
