"""ejax's environments for other libraries: ``gymnasium.Env`` and ``gymnasium.vector.VectorEnv``, jitted, NumPy outside.

Their ids come with ``import ejax.envs.gymnasium``.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from ejax.envs.host.pure_host import PureHostEnv, advance, begin, renew
from ejax.envs.host.rows import choose_rows
from ejax.envs.wrappers.placing import with_events, wrap
from ejax.envs.wrappers.wrapper import innermost
from ejax.schema.episode_limits import LIMITS, limit_argument
from ejax.schema.messages import did_you_mean
from ejax.schema.registry import WRAPPERS, resolve
from ejax.types import Env, HostEnv, PyTree, RenderableEnv

_METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}
_begin, _advance, _renew = (jax.jit(each, static_argnames="env") for each in (begin, advance, renew))


class EjaxEnv(gymnasium.Env[Any, Any]):
    """One environment of ejax. ``reset(seed=s)`` starts as ``env.reset(jax.random.key(s))`` does; without a seed the
    next episode follows from the last, as in a run of ejax.

    ``info`` of a step has ``success`` (bool), ``rewards`` (the reward's terms) and ``metrics``, of tasks with such.

    Args:
        task: a registered name, or an environment in JAX.
        render_mode: ``rgb_array``, of what can be drawn; None: nothing is drawn.
        cfg: the task's arguments. ``episode_length`` and ``max_episode_steps`` mean the same.

    Raises ValueError: a name, an argument or a value that is not allowed, or an environment outside JAX.
    """

    metadata = _METADATA

    def __init__(self, task: str | Env, render_mode: str | None = None, **cfg: Any) -> None:
        self.env = task_of(task, cfg)
        self.metadata = gym_metadata(self.env, render_mode)
        self.render_mode = render_mode
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self._rows: Any = None
        self._ended = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[PyTree, dict[str, Any]]:
        super().reset(seed=seed)
        check_reset_options(options, ())
        if seed is None and self._ended:
            self._rows = _renew(self.env, self._rows)
        else:
            self._rows = _begin(self.env, seeds_of(seed, 1, self.np_random))
        self._ended = False
        return _row(self._rows.obs, 0), {}

    def step(self, action: Any) -> tuple[PyTree, float, bool, bool, dict[str, Any]]:
        if self._rows is None or self._ended:
            raise ResetNeeded(f"{'the episode is over' if self._ended else 'no episode has started'}; call reset()")
        given = np.asarray(action, self.action_space.dtype)[None]
        self._rows, timestep = _advance(self.env, self._rows, given)
        made = _row(timestep, 0)
        self._ended = bool(made.terminated | made.truncated)
        return made.obs, float(made.reward), bool(made.terminated), bool(made.truncated), dict(made.info)

    def render(self) -> NDArray[np.uint8] | None:
        """Draw the state: [480, 640, 3] RGB; None without a render_mode, or before the first reset."""
        if self.render_mode is None or self._rows is None:
            return None
        return draw_row(self.env, self._rows.state, 0)


class EjaxVectorEnv(VectorEnv[Any, Any, Any]):
    """N environments of ejax, one jitted call a step. A row that ends is reset in the same step: ``SAME_STEP``, with
    ``final_obs`` and ``final_info`` as ``gymnasium.vector.SyncVectorEnv`` gives them. Row i takes the course of an
    ``EjaxEnv`` with its seed, but for last bits; ``reset(seed=s)`` gives row i the seed s + i.

    ``info`` has ``success``, ``rewards`` and ``metrics`` of the rows that continue, each name with its mask ``_name``.
    Arguments as of ``EjaxEnv``. ``options``: ``reset_mask``, [N] bool, the rows that ``reset`` resets.
    """

    metadata: dict[str, Any] = {**_METADATA, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # Gymnasium's

    def __init__(self, task: str | Env, num_envs: int = 1, render_mode: str | None = None, **cfg: Any) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs must be an integer >= 1, got {num_envs!r}")
        env = task_of(task, cfg)
        self.metadata = {**gym_metadata(env, render_mode), "autoreset_mode": AutoresetMode.SAME_STEP}
        self.host, self.num_envs, self.render_mode = PureHostEnv(env, num_envs), num_envs, render_mode
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._begun = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[PyTree, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        check_reset_options(options, ("reset_mask",))
        rows = (options or {}).get("reset_mask")
        if rows is not None and (np.shape(rows) != (self.num_envs,) or np.asarray(rows).dtype != bool):
            raise ValueError(f"options['reset_mask'] must be bool [{self.num_envs}], got {rows!r}")
        if rows is not None and not self._begun:
            raise ResetNeeded("the other rows have not started an episode to continue; call reset() without a mask")
        self._begun = True
        return _copied(self.host.reset(seeds_of(seed, self.num_envs, self.np_random), rows)), {}

    def step(self, actions: Any) -> tuple[PyTree, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        if not self._begun:
            raise ResetNeeded("no episode has started; call reset()")
        made = self.host.step(np.asarray(actions, self.single_action_space.dtype))
        done = np.asarray(made.terminated | made.truncated)
        own = {name: value for name, value in made.info.items() if name != "valid"}
        info = _of_rows(own, ~done)
        if done.any():
            final = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(done):
                final[row] = _row(made.final_obs, int(row))
            info |= {"final_obs": final, "_final_obs": done.copy()}
            info |= {"final_info": _of_rows(own, done), "_final_info": done.copy()}
        reward, terminated, truncated = _copied((made.reward, made.terminated, made.truncated))
        return _copied(made.obs), reward, terminated, truncated, info

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:
        """Draw every row: [480, 640, 3] RGB each; None without a render_mode, or before the first reset."""
        if self.render_mode is None or not self._begun:
            return None
        state = self.host.get_state().state
        return tuple(draw_row(self.host.env, state, row) for row in range(self.num_envs))


def task_of(task: str | Env, cfg: Mapping[str, Any]) -> Env:
    """Make a task by name, with its own events; or take one. Raises ValueError."""
    if not isinstance(task, str):
        if cfg:
            raise ValueError(f"arguments ({', '.join(cfg)}) need a task by name; {type(task).__name__} is made already")
        return task
    if task in WRAPPERS:  # around the one that ``env`` names, or is
        options = dict(cfg)
        if "env" not in options:
            raise ValueError(f"{task} wraps another environment: pass env, its name or the environment itself")
        return wrap(task_of(options.pop("env"), options.pop("env_cfg", {})), [(task, options)])
    make, options = resolve("env", task), dict(cfg)
    takes = inspect.signature(make).parameters
    # the two names of one thing; ``gymnasium.make_vec`` hands the first on
    limit, given = limit_argument(make), [name for name in LIMITS if name in options]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} mean the same; keep one")
    if limit is not None and given:
        options[limit] = options.pop(given[0])
    anything = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    for name in () if anything else options.keys() - takes.keys():
        raise ValueError(f"{task} takes no {name}; it takes {', '.join(takes)}{did_you_mean(name, takes)}")
    try:
        env = make(**options)
    except TypeError as error:
        raise ValueError(f"{task}: {error}") from error
    if isinstance(env, HostEnv | gymnasium.Env | VectorEnv):
        raise ValueError(f"{task} is already stepped outside JAX; make it with its own library")
    return with_events(env, {})


def gym_metadata(env: Env, render_mode: str | None) -> dict[str, Any]:
    """Return Gymnasium's metadata. Raises ValueError: a render_mode that it does not have."""
    drawn = isinstance(innermost(env), RenderableEnv)
    modes = list(_METADATA["render_modes"]) if drawn else []
    if render_mode is not None and render_mode not in modes:
        name = type(innermost(env)).__name__
        allowed = f"allowed: None, {', '.join(modes)}" if drawn else f"{name} cannot be drawn: it has no render(state)"
        raise ValueError(f"render_mode: got {render_mode!r}; {allowed}")
    period = getattr(env, "control_period", None) if drawn else None
    return {"render_modes": modes, "render_fps": round(1.0 / period) if period else _METADATA["render_fps"]}


def check_reset_options(options: Mapping[str, Any] | None, allowed: Sequence[str]) -> None:
    """Raise ValueError for options of ``reset`` that are not there."""
    for name in (options or {}).keys() - allowed:
        raise ValueError(f"reset takes no option '{name}'; there is {', '.join(allowed) or 'none'}")


def seeds_of(seed: int | Sequence[int | None] | None, num_rows: int, random: np.random.Generator) -> NDArray[np.uint32]:
    """List a seed for each row, those of None drawn. Raises ValueError: too many or few, or not within 32 bits."""
    listed = range(seed, seed + num_rows) if isinstance(seed, int | np.integer) else seed or [None] * num_rows
    if len(listed) != num_rows:
        raise ValueError(f"seed: got {len(listed)} seeds; pass one number, or one for each of {num_rows} environments")
    if wrong := [each for each in listed if each is not None and not 0 <= each < 2**32]:
        raise ValueError(f"seed: got {wrong[0]}; must be within 0 … 2³² − 1")
    return np.array([random.integers(2**32) if each is None else each for each in listed], np.uint32)


def draw_row(env: Any, state: PyTree, row: int) -> NDArray[np.uint8]:
    return np.asarray(env.render(jax.tree.map(lambda x: x[row], state)), np.uint8)


def _row(batch: PyTree, row: int) -> PyTree:
    """Copy a row to the host."""
    return jax.tree.map(lambda x: np.asarray(x)[row].copy(), jax.device_get(batch))


def _copied(batch: PyTree) -> PyTree:
    return jax.tree.map(np.array, batch)  # JAX's are read-only, and others write into theirs


def _of_rows(info: Mapping[str, Any], rows: NDArray[np.bool_]) -> dict[str, Any]:
    """Return each name with its mask ``_name`` [N], and zeros in the other rows."""
    found: dict[str, Any] = {}
    for name, value in info.items():
        nested = isinstance(value, Mapping)
        found[name] = _of_rows(value, rows) if nested else choose_rows(rows, value, np.zeros_like(value))
        found[f"_{name}"] = rows.copy()
    return found
