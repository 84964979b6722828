"""The observations that an export is checked on, and JAX's answers to them.

``environment``: where the policy itself goes. The others are adversarial: ``edges`` (every feature at one of the two
ends of its range), ``zeros``, ``huge`` (magnitudes from 10² to 10⁶), ``not_a_number`` (one NaN in each row).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from ejax.types import Array, Env, Key, Params, Policy, PyTree
from ejax.unroll import EnvCarry, reset, step
from interop.parity import Arrays, Case, allowed_error
from interop.policy_spec import WHOLE, PolicySpec

Bounds = tuple[tuple[float, ...], tuple[float, ...]]
_NUM_ENVS, _NUM_STEPS = 16, 128
_NUM_ADVERSARIAL = 256
_NUM_DISTURBED = 8


def draw_cases(policy: Policy, params: Params, spec: PolicySpec, seen: Arrays, space: gymnasium.Space) -> list[Case]:
    """
    Args:
        seen: observations of the environment, ``leaves_of`` them: [B, F] each.
        space: of the observation; its finite bounds are edges too.
    """
    rng = np.random.default_rng(0)
    ranges = feature_ranges(seen, space)
    observations: dict[str, Arrays] = {
        "environment": seen,
        "edges": {name: _vertices(rng, *ranges[name]) for name in seen},
        "zeros": {name: np.zeros_like(x[:1]) for name, x in seen.items()},
        "huge": {name: _huge(rng, x.shape[-1]) for name, x in seen.items()},
    }
    if spec.continuous:  # which choice is the best among NaNs is no question with an answer
        observations["not_a_number"] = _with_one_nan(rng, seen, spec.actor.inputs)
    together = {name: np.concatenate([obs[name] for obs in observations.values()]) for name in seen}
    expected, allowed = _answer(policy, params, spec, together)
    ends = np.cumsum([len(obs[spec.actor.inputs[0]]) for obs in observations.values()])

    def part(arrays: Arrays, i: int) -> Arrays:
        return {name: np.split(x, ends)[i] for name, x in arrays.items()}

    mine = {name: together[name] for name in spec.actor.inputs}
    return [Case(name, part(mine, i), part(expected, i), part(allowed, i)) for i, name in enumerate(observations)]


def observe(policy: Policy, env: Env, params: Params, bounds: Bounds | None) -> tuple[Arrays, bool]:
    """Act in the environment with sampled actions, so that the observations spread as in training.

    Returns:
        The observations [B, F] by path; whether the environment itself clips actions to ``bounds``: wherever it was,
        actions far beyond them did the same as clipped ones. Where it does not, a clipped policy is another policy.
    """
    obs, clips = _act(policy, env, params, jax.random.key(0), bounds=bounds)
    seen = {name: np.asarray(x, np.float32).reshape(-1, x.shape[-1]) for name, x in leaves_of(obs).items()}
    return seen, bool(clips.all())


def leaves_of(obs: Any) -> dict[str, Any]:
    """The observation's arrays by dotted path, sorted at each level; ``{"obs": obs}`` if it is one array."""
    if not isinstance(obs, Mapping | gymnasium.spaces.Dict):
        return {WHOLE: obs}
    found: dict[str, Any] = {}
    for name in sorted(obs):
        node = obs[name]
        nested = isinstance(node, Mapping | gymnasium.spaces.Dict)
        found |= {f"{name}.{path}": x for path, x in leaves_of(node).items()} if nested else {name: node}
    return found


def nest(leaves: Mapping[str, Any]) -> PyTree:
    """The inverse of ``leaves_of``."""
    if list(leaves) == [WHOLE]:
        return leaves[WHOLE]
    tree: dict[str, Any] = {}
    for path, x in leaves.items():
        *branches, name = path.split(".")
        node = tree
        for branch in branches:
            node = node.setdefault(branch, {})
        node[name] = x
    return tree


def feature_ranges(seen: Arrays, space: gymnasium.Space) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """(low, high) [F] of each array: the space's bounds where they are finite, what was seen where they are not."""
    ranges = {}
    for name, box in leaves_of(space).items():
        low, high = seen[name].min(axis=0), seen[name].max(axis=0)
        if isinstance(box, gymnasium.spaces.Box):
            low, high = (np.where(np.isfinite(b), b, s) for b, s in ((box.low, low), (box.high, high)))
        ranges[name] = (low.astype(np.float32), high.astype(np.float32))
    return ranges


@partial(jax.jit, static_argnames=("policy", "bounds"))
def deployed_answer(policy: Policy, params: Params, obs: PyTree, bounds: Bounds | None) -> tuple[Array, ...]:
    """What a deployed policy returns: the mode, clipped, and the distribution's parameters."""
    distribution, _ = policy.apply(params, obs)
    action = distribution.mode()
    if isinstance(distribution, Categorical):
        return action, distribution.logits
    if isinstance(distribution, MultiCategorical):
        return action, jnp.concatenate([part.logits for part in distribution.parts], axis=-1)
    normal = distribution.base if isinstance(distribution, TanhNormal) else distribution
    if not isinstance(normal, Normal):
        raise TypeError(f"no export of a {type(distribution).__name__} distribution")
    return clip(action, bounds), normal.mean, normal.log_std


def clip(action: Array, bounds: Bounds | None) -> Array:
    if bounds is None:
        return action
    low, high = (jnp.broadcast_to(jnp.asarray(bound, action.dtype), action.shape) for bound in bounds)
    return jnp.clip(action, low, high)


def _answer(policy: Policy, params: Params, spec: PolicySpec, obs: Arrays) -> tuple[Arrays, Arrays]:
    """JAX's answers, and the errors that are allowed against them."""
    with jax.default_matmul_precision("highest"):
        outputs = deployed_answer(policy, params, nest(obs), spec.clip)
        with jax.enable_x64(True):
            exact, *disturbed = _disturbed_answers(policy, params, spec, obs)
    expected = dict(zip(spec.outputs, map(np.asarray, outputs), strict=True))
    allowed = {}
    for i, (name, y) in enumerate(expected.items()):
        if y.dtype == np.float32:
            others = np.stack([y, *(answer[i] for answer in disturbed)])
            allowed[name] = allowed_error(y, np.abs(others - exact[i]).max(axis=0))
    return expected, allowed


def _disturbed_answers(policy: Policy, params: Params, spec: PolicySpec, obs: Arrays) -> list[list[NDArray[Any]]]:
    """Answers in float64: the exact ones, then those to numbers that are off by a relative 2⁻²²."""
    rng = np.random.default_rng(1)
    numbers = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, nest(obs)))

    def disturb(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x * (1.0 + rng.choice((-(2.0**-22), 2.0**-22), x.shape))

    draws = [numbers, *(jax.tree.map(disturb, numbers) for _ in range(_NUM_DISTURBED))]
    return [[np.asarray(y) for y in deployed_answer(policy, *draw, spec.clip)] for draw in draws]


@partial(jax.jit, static_argnames=("policy", "env", "bounds"))
def _act(policy: Policy, env: Env, params: Params, key: Key, *, bounds: Bounds | None) -> tuple[PyTree, Array]:
    """Observations [T, N, ...], and whether the environment clipped [T]."""
    key_reset, key_steps = jax.random.split(key)

    def one_step(carry: EnvCarry, key: Key) -> tuple[EnvCarry, tuple[PyTree, Array]]:
        key_action, key_env = jax.random.split(key)
        action = policy.apply(params, carry.obs)[0].sample(key_action)
        after, _ = step(env, carry, action, key_env)
        clips = jnp.bool_(False) if bounds is None else _clips(env, carry, action, key_env, bounds)
        return after, (carry.obs, clips)

    start = reset(env, key_reset, _NUM_ENVS)
    _, (obs, clips) = jax.lax.scan(one_step, start, jax.random.split(key_steps, _NUM_STEPS))
    return obs, clips


def _clips(env: Env, carry: EnvCarry, action: Array, key: Key, bounds: Bounds) -> Array:
    """Whether actions far beyond the bounds, on the sides that ``action`` leans to, do what clipped ones do."""
    low, high = (jnp.broadcast_to(jnp.asarray(bound, action.dtype), action.shape) for bound in bounds)
    beyond = jnp.where(action < (low + high) / 2.0, low - (high - low), high + (high - low))
    far, near = (step(env, carry, a, key)[1] for a in (beyond, clip(beyond, bounds)))
    equal = jax.tree.map(lambda a, b: (a == b).all(), (far.final_obs, far.reward), (near.final_obs, near.reward))
    return jnp.stack(jax.tree.leaves(equal)).all()


def _vertices(rng: np.random.Generator, low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.float32]:
    """Random corners of the box, and the two extreme ones."""
    at_high = rng.random((_NUM_ADVERSARIAL, low.size)) < 0.5
    at_high[0], at_high[1] = False, True
    return np.where(at_high, high, low).astype(np.float32)


def _huge(rng: np.random.Generator, width: int) -> NDArray[np.float32]:
    exponent = rng.uniform(2.0, 6.0, (_NUM_ADVERSARIAL, width))
    return (rng.choice((-1.0, 1.0), exponent.shape) * 10.0**exponent).astype(np.float32)


def _with_one_nan(rng: np.random.Generator, seen: Arrays, inputs: tuple[str, ...]) -> Arrays:
    rows = min(_NUM_ADVERSARIAL, len(next(iter(seen.values()))))
    spoilt = {name: x[:rows].copy() for name, x in seen.items()}
    features = [(name, i) for name in inputs for i in range(seen[name].shape[-1])]
    for row, pick in enumerate(rng.integers(len(features), size=rows)):
        name, i = features[pick]
        spoilt[name][row, i] = np.nan
    return spoilt
