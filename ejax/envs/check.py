"""A check of an environment: whether ``reset`` and ``step`` fit the spaces and each other. Each misfit is named by its
leaf, with what was given and what is allowed."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.envs.actions import action_form, ends, to_action
from ejax.envs.description import describe
from ejax.schema.messages import describe_error
from ejax.schema.paths import named
from ejax.schema.problems import ConfigError, Problem
from ejax.types import Array, Env, HostEnv, Key, PyTree, Timestep, persist

_NUM_ROWS = 4
_NUM_STEPS_BEYOND = 8


def check_env(env: Env, *, num_steps: int = 200, seed: int = 0) -> str:
    """Check an environment in JAX by its shapes and by playing it with random actions.

    ``num_steps`` are played, or ``max_episode_steps`` if fewer: the same key gives the same episode, numbers stay
    finite and within their spaces, an episode ends. Returns what was checked, in one line. Raises ConfigError:
    everything that does not fit, by leaf.
    """
    check_shapes(env)
    if problems := list(_leaked(env)) or list(_played(env, num_steps, seed)):
        raise ConfigError(problems, _name(env))
    steps = _num_played(env, num_steps)
    ends = ", ends" if 0 < env.max_episode_steps <= num_steps else ""
    return (
        f"{_name(env)} fits: shapes and types of reset and step, no leaked arrays; {_NUM_ROWS} episodes of {steps} "
        f"random actions, twice with the same key: equal, finite, within observation_space{ends}"
    )


def check_shapes(env: Any) -> None:
    """Check what ``check_env`` can without computing. Raises ConfigError: everything that does not fit, by leaf."""
    # what has not the form of an environment cannot be traced
    if problems := list(_form(env)) or list(_traced(env)):
        raise ConfigError(problems, _name(env))


def clips_actions(env: Env | HostEnv) -> bool | None:
    """Find whether an environment clips a Box's numbers to its bounds: by its word, else by playing it in JAX with
    actions far beyond them. None: not known, since it is stepped outside JAX and does not say (``clip_actions``)."""
    form = action_form(env.action_space, clips=True)
    if form.clip is None or form.whole or describe(env).clips_actions:
        return form.clip is not None
    if isinstance(env, HostEnv):
        return None
    length, key = _num_played(env, _NUM_STEPS_BEYOND), jax.random.key(0)
    # one program for both: of two, XLA may round one otherwise
    play = jax.jit(lambda near: _episode(env, length, key, partial(_action_beyond, env.action_space, near)))
    far, near = (jax.tree.leaves(jax.device_get(play(near))) for near in (False, True))
    return all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in zip(far, near, strict=True))


def _form(env: Any) -> Iterator[Problem]:
    if isinstance(env, type):
        yield Problem("", f"got the class {env.__name__}; pass an environment: {env.__name__}()")
        return
    if isinstance(env, gymnasium.Env):
        yield Problem("", "is stepped outside JAX; gymnasium.utils.env_checker.check_env checks it (docs/host_envs.md)")
        return
    if isinstance(env, HostEnv):
        yield Problem("", "is stepped outside JAX, where ejax checks every answer as it comes (docs/host_envs.md)")
        return
    for name in ("reset", "step"):
        if not callable(getattr(env, name, None)):
            yield Problem(name, "is missing; see ejax.types.Env")
    spaces = gymnasium.spaces
    for name, kinds, wanted in (
        ("observation_space", spaces.Box | spaces.Dict, "a Box, or a Dict of them"),
        ("action_space", spaces.Box | spaces.Discrete | spaces.MultiDiscrete, "a Box, a Discrete or a MultiDiscrete"),
    ):
        if not isinstance(space := _call(env, name, lambda name=name: getattr(env, name, None)), kinds):
            got = space if isinstance(space, gymnasium.Space) else _shown(space)
            yield Problem(name, f"got {got}; must be {wanted}, of gymnasium's spaces")
        _call(env, name, named, space)
    steps = _call(env, "max_episode_steps", lambda: getattr(env, "max_episode_steps", None))
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
        yield Problem("max_episode_steps", f"got {_shown(steps)}; must be an integer, 0 for no limit")
    try:
        hash(env)
    except TypeError as error:
        yield Problem("", f"cannot be hashed ({error}); make it a frozen dataclass with tuples in place of lists")


def _traced(env: Env) -> Iterator[Problem]:
    key = jax.eval_shape(lambda: jax.random.key(0))
    started = _call(env, "reset", jax.eval_shape, env.reset, key)
    if not isinstance(started, tuple) or len(started) != 2:
        yield Problem("reset", f"gave {_shown(started)}; must be (state, obs)")
        return
    state, obs = started
    yield from _beside_space("reset: obs", obs, env.observation_space)
    action = jax.eval_shape(lambda: _zero_action(env.action_space))
    stepped = _call(env, "step", jax.eval_shape, env.step, state, action, key)
    if not isinstance(stepped, tuple) or len(stepped) != 2 or not isinstance(stepped[1], Timestep):
        yield Problem("step", f"gave {_shown(stepped)}; must be (state, ejax.Timestep)")
        return
    after, timestep = stepped
    yield from _alike("step: state", after, state)
    yield from _beside_space("step: obs", timestep.obs, env.observation_space)
    for name, dtype in (("reward", np.float32), ("terminated", np.bool_), ("truncated", np.bool_)):
        yield from _scalar(f"step: {name}", getattr(timestep, name), dtype)
    if timestep.final_obs is not None:
        yield Problem("step: final_obs", "is not None; ejax.rollout fills it, leave it out")
    yield from _info(timestep.info)
    kept = _call(env, "persist", jax.eval_shape, partial(persist, env), after, state, obs)
    if kept is not None:
        yield from _alike("persist: state", kept[0], state)
        yield from _alike("persist: obs", kept[1], obs)


def _info(info: Any) -> Iterator[Problem]:
    if not isinstance(info, dict):
        yield Problem("step: info", f"got {_shown(info)}; must be a dict, {{}} for nothing")
        return
    if "success" in info:
        yield from _scalar("step: info.success", info["success"], np.bool_)
    for part in ("metrics", "rewards", "terms"):
        given = info.get(part, {})
        if not isinstance(given, Mapping):
            yield Problem(f"step: info.{part}", f"got {_shown(given)}; must be a dict of arrays by name")
            continue
        for name, x in given.items():
            if not hasattr(x, "dtype") or (part != "metrics" and x.shape):
                wanted = "an array, of which scalars are logged" if part == "metrics" else "a scalar array"
                yield Problem(f"step: info.{part}.{name}", f"got {_shown(x)}; must be {wanted}")


def _scalar(where: str, x: Any, dtype: type) -> Iterator[Problem]:
    if not hasattr(x, "dtype") or x.shape != () or x.dtype != dtype:
        wanted = f"{np.dtype(dtype).name}[]"
        fix = f"jnp.asarray(…, {'bool' if dtype is np.bool_ else 'jnp.float32'})"
        yield Problem(where, f"got {_shown(x)}; must be {wanted}, a scalar array: {fix}")


def _beside_space(where: str, obs: PyTree, space: gymnasium.Space[Any]) -> Iterator[Problem]:
    if isinstance(space, gymnasium.spaces.Dict):
        if not isinstance(obs, Mapping) or set(obs) != set(space.spaces):
            got = f"the parts {', '.join(sorted(obs))}" if isinstance(obs, Mapping) else _shown(obs)
            yield Problem(where, f"got {got}; observation_space has the parts {', '.join(sorted(space.spaces))}")
            return
        for name, part in space.spaces.items():
            yield from _beside_space(f"{where}.{name}", obs[name], part)
        return
    box: Any = space
    # JAX makes float32 of a float64 space
    dtypes = (box.dtype, np.float32) if box.dtype == np.float64 else (box.dtype,)
    if not hasattr(obs, "dtype") or obs.shape != box.shape or obs.dtype not in dtypes:
        yield Problem(where, f"got {_shown(obs)}; observation_space says {np.dtype(box.dtype).name}{list(box.shape)}")


def _alike(where: str, given: PyTree, wanted: PyTree) -> Iterator[Problem]:
    one, other = (
        {jax.tree_util.keystr(path): _shown(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (given, wanted)
    )
    for leaf in sorted(one.keys() | other.keys()):
        if leaf not in one:
            yield Problem(f"{where}{leaf}", f"is missing; reset gives {other[leaf]}")
        elif one[leaf] != other.get(leaf):
            gives = other.get(leaf, "nothing there")
            yield Problem(f"{where}{leaf}", f"got {one[leaf]}; reset gives {gives}, and every state must be alike")
    trees: tuple[Any, Any] = jax.tree.structure(given), jax.tree.structure(wanted)
    if one.keys() == other.keys() and trees[0] != trees[1]:
        yield Problem(where, f"got the tree {trees[0]}; reset gives {trees[1]}")


def _leaked(env: Env) -> Iterator[Problem]:
    def play(key: Key) -> PyTree:
        state, _ = env.reset(key)
        return env.step(state, _zero_action(env.action_space), key)

    try:
        # slow, but exact: a leak shows nowhere else until it crashes a later trace
        with jax.checking_leaks():
            jax.eval_shape(play, jax.random.key(0))
    except Exception as error:  # JAX has no type for it
        if "Leaked" not in str(error):
            raise
        text = "an array of one trace is kept outside the state, such as in an attribute; keep it in the state"
        yield Problem("reset, step", text)


def _played(env: Env, num_steps: int, seed: int) -> Iterator[Problem]:
    limit, length = env.max_episode_steps, _num_played(env, num_steps)
    key = jax.random.key(seed)
    try:
        # two traces: what Python or NumPy draws is a constant in each
        first, second = (jax.device_get(jax.jit(partial(_episode, env, length))(key)) for _ in range(2))
    except Exception as error:  # any error here is the environment's own
        yield Problem("step", describe_error(error))
        return
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True):
        if not np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.floating)):
            text = "differs between two episodes of the same key; draw from the key alone, with jax.random"
            yield Problem(jax.tree_util.keystr(path).lstrip("."), text)
            return
    # steps are played on past an end, where nothing has to hold
    running = np.concatenate([np.ones((1, _NUM_ROWS), bool), ~first["ended"].cumsum(axis=0).astype(bool)])
    for name in ("obs", "reward"):
        for path, x in jax.tree_util.tree_leaves_with_path(first[name]):
            broken = ~np.isfinite(x).reshape(*x.shape[:2], -1).all(axis=-1) & running[: len(x)]
            if broken.any():
                text = f"is not finite after {broken.any(axis=1).argmax()} steps of random actions"
                yield Problem(f"{name}{jax.tree_util.keystr(path)}", text)
                return
    yield from _within(env.observation_space, first["obs"], running, "obs")
    if limit and limit <= num_steps and not first["ended"].any(axis=0).all():
        yield Problem("truncated", f"no end after max_episode_steps, {limit}: count steps in the state and truncate")


def _num_played(env: Env, num_steps: int) -> int:
    return min(num_steps, env.max_episode_steps or num_steps)


def _within(space: Any, obs: PyTree, running: Any, where: str) -> Iterator[Problem]:
    if isinstance(space, gymnasium.spaces.Dict):
        for name, part in space.spaces.items():
            yield from _within(part, obs[name], running, f"{where}.{name}")
        return
    seen = obs[running[: len(obs)]]
    for text, bound, outside in (("below", space.low, seen < space.low), ("above", space.high, seen > space.high)):
        if outside.any():
            row, *at = map(int, np.argwhere(outside)[0])
            value, end = seen[row, *at], bound[tuple(at)]
            yield Problem(f"{where}{at}", f"got {value:g}, {text} the {end:g} of observation_space")


def _episode(env: Env, length: int, key: Key, draw: Callable[[Key], Array] | None = None) -> dict[str, PyTree]:
    """Observations [length + 1, N, ...], rewards and ends [length, N] of random actions, played on past their ends."""
    draw = draw or partial(_random_action, env.action_space)
    key_reset, key_steps = jax.random.split(key)
    state, obs = jax.vmap(env.reset)(jax.random.split(key_reset, _NUM_ROWS))

    def one_step(state: PyTree, key: Key) -> tuple[PyTree, tuple[PyTree, Array, Array]]:
        key_action, key_step = jax.random.split(key)
        actions = jax.vmap(draw)(jax.random.split(key_action, _NUM_ROWS))
        state, timestep = jax.vmap(env.step)(state, actions, jax.random.split(key_step, _NUM_ROWS))
        return state, (timestep.obs, timestep.reward, timestep.terminated | timestep.truncated)

    _, (later, reward, ended) = jax.lax.scan(one_step, state, jax.random.split(key_steps, length))
    seen = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), obs, later)
    return {"obs": seen, "reward": reward, "ended": ended}


def _zero_action(space: Any) -> Array:
    kind = jnp.float32 if isinstance(space, gymnasium.spaces.Box) else jnp.int32
    return to_action(action_form(space), jnp.zeros((1, *space.shape), kind), jnp)[0]


def _random_action(space: Any, key: Key) -> Array:
    if isinstance(space, gymnasium.spaces.Box):
        below, above = np.isfinite(space.low), np.isfinite(space.high)
        low, high = (
            jnp.where(x, jnp.asarray(b, jnp.float32), 0.0) for x, b in ((below, space.low), (above, space.high))
        )
        uniform = low + (high - low) * jax.random.uniform(key, space.shape)
        # numbers without bounds are drawn from a normal distribution; with one of them, from its half on that side
        normal = jax.random.normal(key, space.shape)
        half = jnp.where(below, low + jnp.abs(normal), jnp.where(above, high - jnp.abs(normal), normal))
        drawn = jnp.where(below & above, uniform, half)
    else:
        size = space.nvec if isinstance(space, gymnasium.spaces.MultiDiscrete) else space.n
        drawn = jax.random.randint(key, space.shape, 0, jnp.asarray(size, jnp.int32))
    return to_action(action_form(space), drawn[None], jnp)[0]


def _action_beyond(space: Any, near: Array, key: Key) -> Array:
    """Draw an action far beyond the bounds of a Box, on a side that has one; ``near``: on the bounds instead."""
    form = action_form(space, clips=True)
    low, high = (jnp.asarray(x, jnp.float32) for x in ends(form.clip))
    below, above = jnp.isfinite(low), jnp.isfinite(high)
    span = jnp.where(below & above, high - low, 1.0 + jnp.abs(jnp.where(below, low, high)))
    down = jax.random.bernoulli(key, shape=low.shape) & below | ~above
    beyond = jnp.where(down, jnp.where(below, low - span, 0.0), high + span)
    return to_action(form._replace(clip=None), jnp.where(near, jnp.clip(beyond, low, high), beyond)[None], jnp)[0]


def _call(env: Any, name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:  # any error here is the environment's own
        raise ConfigError([Problem(name, describe_error(error))], _name(env)) from error


def _shown(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    if x is None:
        return "nothing"
    kind = type(x).__name__
    if isinstance(x, tuple | list):
        return f"{kind} of {len(x)}"
    return f"{kind} {x!r}" if isinstance(x, int | float | str) else kind


def _name(env: Any) -> str:
    return env.__name__ if isinstance(env, type) else type(env).__name__
