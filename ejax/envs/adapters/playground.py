"""MuJoCo Playground environments: ``playground:CartpoleBalance``. They have Brax's interface."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from ejax.envs.adapters.brax import BraxEnv, adapt
from ejax.envs.adapters.library import check_name, check_options, import_library
from ejax.envs.adapters.playground_host import HostPhysicsEnv
from ejax.envs.mujoco.engines.warp import import_warp, lost_flags

_LONG_RESETS = ("CheetahRun",)  # 200 physics steps


def make(name: str, *, max_episode_steps: int | None = None, impl: str = "jax", **overrides: Any) -> BraxEnv:
    """Make a MuJoCo Playground environment.

    Args:
        max_episode_steps: time limit. None: the environment's ``episode_length``, in steps of its ``action_repeat``.
        impl: ``jax`` (MJX), on every device; ``c``, MuJoCo's C engine on the host, for tasks of the DeepMind Control
            Suite; or ``warp``, on CUDA and, for tests, on a CPU. Warp's contacts lie in one buffer for all rows, of the
            config's ``naconmax``; rows that may have lost some there, or of their ``njmax`` constraints, are NaN.
        overrides: entries of the environment's config, nested or dotted: ``{"ctrl_dt": 0.02}``.

    Raises:
        ModuleNotFoundError: Playground is not installed.
        FileNotFoundError: the environment needs robot models that are not on this machine.
        ValueError: an unknown name, an entry that the config does not have or in another type, another ``impl``.
    """
    if impl not in ("jax", "c", "warp"):
        raise ValueError(f"impl must be 'jax', 'c' or 'warp', got {impl!r}")
    if impl == "warp":
        import_warp()
    library = import_library("mujoco_playground", "playground")
    registry = library.registry
    check_name("playground", name, registry.ALL_ENVS)
    if name not in library.dm_control_suite.ALL_ENVS:
        _check_models(name)
        if impl == "c":
            text = "impl 'c' is for tasks of the DeepMind Control Suite, which read no contacts of MJX"
            raise ValueError(f"{text}; playground:{name} may: give 'jax', or 'warp'")
    config = registry.get_default_config(name)
    given = {"impl": "jax" if impl == "c" else impl} if "impl" in config else {}
    options = flatten_dict(overrides, sep=".") | given
    check_options(f"playground:{name}", "config entry", options, flatten_dict(config.to_dict(), sep="."))
    config.update_from_flattened_dict(options)
    with jax.ensure_compile_time_eval():  # constants, even if called while a program is traced
        env = registry.load(name, config=config)
    if impl != "jax":
        options["impl"] = impl  # environments of equal name and options share programs
        env = _WarpEnv(env) if impl == "warp" else HostPhysicsEnv(env, repr((name, sorted(options.items()))))
    repeat = config.get("action_repeat", 1)
    limit = math.ceil(config.episode_length / repeat) if max_episode_steps is None else max_episode_steps
    sizes = {"max_episode_steps": limit, "action_repeat": repeat, "long_reset": name in _LONG_RESETS}
    return adapt(f"playground:{name}", env, **sizes, options=options)


@dataclass(frozen=True)
class _WarpEnv:
    """An environment on Warp whose states are rows, without the whole batch's contacts, which each step finds again."""

    env: Any

    @property
    def action_size(self) -> int:
        return int(self.env.action_size)

    def reset(self, key: Any) -> Any:
        return self._rows(self.env.reset(key))

    def step(self, state: Any, action: Any) -> Any:
        # what rows share is left out of their states, and made blank again for the step, which fills it first
        blank = jax.eval_shape(self.env.reset, jax.random.PRNGKey(0)).data
        leaves, structure = jax.tree_util.tree_flatten_with_path(blank)
        rows = iter(state.data)
        full = [jnp.zeros(x.shape, x.dtype) if _is_shared(path) else next(rows) for path, x in leaves]
        data = jax.tree.unflatten(structure, full)
        after = self.env.step(state.replace(data=data), action)
        lost = (after.data._impl.overflow & lost_flags()) != 0

        def broken(x: Any) -> Any:
            return jnp.where(lost, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x

        after = self._rows(after)
        obs, data = jax.tree.map(broken, (after.obs, after.data))
        return after.replace(obs=obs, data=data, reward=broken(after.reward))

    def _rows(self, state: Any) -> Any:
        leaves = jax.tree_util.tree_flatten_with_path(state.data)[0]
        return state.replace(data=tuple(x for path, x in leaves if not _is_shared(path)))


def _is_shared(path: Any) -> bool:
    from mujoco.mjx.warp.types import _BATCH_DIM

    names = [part.name for part in path if part.name != "_impl"]
    return not _BATCH_DIM["Data"].get("__".join(names), True)


def _check_models(name: str) -> None:
    place = import_library("mujoco_playground._src.mjx_env", "playground").MENAGERIE_PATH
    if not place.exists():
        command = "from mujoco_playground._src import mjx_env; mjx_env.ensure_menagerie_exists()"
        text = f"playground:{name} needs the robot models of mujoco_menagerie in {place}, which ejax does not download"
        raise FileNotFoundError(f"{text}: once, with a network, python -c '{command}'; DM Control Suite's need none")
