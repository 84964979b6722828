"""The observations that an export is checked on, and JAX's answers to them.

``environment``: where the policy itself goes; of one with memory, with what it remembered there, as in all others.
``consecutive``, of a policy with memory: 1,000 steps of one environment, episode after episode, each answered with the
memory that the answer before gave. The others are adversarial: ``edges`` (every feature at one of the two
ends of its range), ``zeros``, ``huge`` (magnitudes from 10² to 10⁶), ``not_a_number`` (one NaN in each row). Images are
the environment's in the last two, patterns of 0 and 255 in ``edges``; ``noise`` has random bytes for images, and the
environment's numbers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from ejax.policies.calls import apply_policy, forget
from ejax.policies.vla.flow import FlowChunk
from ejax.rollout import EnvCarry, reset, step, with_memory
from ejax.types import Array, Env, Key, Params, Policy, PolicyWithMemory, PyTree
from interop.artefacts.adversaries import adversarial_observations
from interop.artefacts.parity import Arrays, Case, allowed_error
from interop.standalone_verify import CONSECUTIVE
from interop.twin.kinds import Spec
from interop.twin.program_spec import ProgramSpec
from interop.twin.spec import MEMORY, WHOLE, PolicySpec
from interop.twin.vla_spec import NOISE

Bounds = tuple[tuple[float, ...], tuple[float, ...]]
_NUM_ENVS, _NUM_STEPS = 16, 128
_NUM_CONSECUTIVE = 1000
_IMAGE_BYTES = 1024 * 64 * 64 * 3
"""Size of the environment's images: as many of 64x64 as the largest batch that is checked, fewer of larger ones."""
_CHUNK_BYTES = 2**22
"""Size of images that are answered at a time; activations take some thirty times as much."""
_STEPS_BETWEEN_CHECKS = 4
"""Steps between checks of clipping where there are images: each check draws two of them for every environment."""
_NUM_DISTURBED = 8
_EPSILON = 2.0**-22


def draw_cases(
    policy: Policy, params: Params, spec: PolicySpec | ProgramSpec, seen: Arrays, space: gymnasium.Space
) -> list[Case]:
    """Draw the cases that the module's text lists.

    Args:
        seen: observations of the environment, ``leaves_of`` them: [B, F] each, images [B, height, width, channels].
        space: of the observation; its finite bounds are edges too.
    """
    seen, played = (seen, None) if spec.memory is None else _apart(seen)
    observed = {name: x for name, x in seen.items() if name != MEMORY}
    adversarial = adversarial_observations(observed, feature_ranges(seen, space, spec), spec)
    if spec.memory is not None:
        for obs in adversarial.values():
            obs[MEMORY] = np.take(seen[MEMORY], np.arange(len(obs[spec.inputs[0]])), axis=0, mode="wrap")
    observations: dict[str, Arrays] = {"environment": seen, **adversarial}
    whole = {*spec.images, MEMORY} if spec.memory else spec.images.keys()

    def narrowed(together: Arrays) -> Arrays:
        return {name: x if name in whole else x[:, list(spec.read(name))] for name, x in together.items()}

    cases = answered(policy, params, spec, observations, narrowed)
    return cases if played is None else [*cases, _consecutive(policy, params, spec, played)]


def answered(
    policy: Policy,
    params: Params,
    spec: Spec,
    observations: Mapping[str, Arrays],
    inputs_of: Callable[[Arrays], Arrays],
) -> list[Case]:
    """Answer observations of all kinds together, and cut the answers apart.

    Args:
        observations: kind -> what the policy itself takes, by path: [B, ...] each.
        inputs_of: makes a deployed policy's ``spec.inputs`` of that.
    """
    first = next(iter(observations.values()))
    # together: JAX compiles for each batch size
    together = {path: np.concatenate([obs[path] for obs in observations.values()]) for path in first}
    expected, allowed = _answer(policy, params, spec, together)
    inputs = inputs_of(together)
    parts = ({name: inputs[name] for name in spec.inputs}, expected, allowed)
    ends = np.cumsum([len(next(iter(obs.values()))) for obs in observations.values()])
    cut = [{name: np.split(x, ends) for name, x in part.items()} for part in parts]
    return [
        Case(kind, *({name: x[i] for name, x in part.items()} for part in cut)) for i, kind in enumerate(observations)
    ]


def _apart(seen: Arrays) -> tuple[Arrays, Arrays]:
    """Split off the first rows that all environments saw, and all that the first of them saw, step by step."""
    steps = {name: x.reshape(_NUM_CONSECUTIVE, -1, *x.shape[1:]) for name, x in seen.items()}
    first = {name: x[:_NUM_STEPS].reshape(-1, *x.shape[2:]) for name, x in steps.items()}
    return first, {name: x[:, 0] for name, x in steps.items()}


def _consecutive(policy: Policy, params: Params, spec: Spec, played: Arrays) -> Case:
    expected, allowed = _answer_to_chunk(policy, params, spec, played, answer=_loop_answer)
    # zeros mark an episode's first step: no memory of a later one is all zeros
    starts = ~played[MEMORY].any(axis=1, keepdims=True)
    before = np.concatenate([np.zeros_like(played[MEMORY][:1]), expected["next_memory"][:-1]])
    observation = {**played, MEMORY: np.where(starts, np.float32(0.0), before)}
    return Case(CONSECUTIVE, {name: observation[name] for name in spec.inputs}, expected, allowed)


def observe(policy: Policy, env: Env, params: Params, spec: Spec, bounds: Bounds | None) -> tuple[Arrays, bool]:
    """Act in the environment with sampled actions, so that the observations spread as in training.

    Returns:
        The observations [B, ...] by path, with the actor's ``memory`` where it has one; whether the environment itself
        clips actions to ``bounds``: wherever it was, actions far beyond them did the same as clipped ones. Where it
        does not, a clipped policy is another policy.
    """
    num_steps = steps_to_observe(spec, env.observation_space)
    every = _STEPS_BETWEEN_CHECKS if spec.images else 1
    key = jax.random.key(0)
    (obs, memory), clips = _act(policy, env, params, key, bounds=bounds, num_steps=num_steps, check_every=every)
    leaves = leaves_of(obs) | ({} if memory == () else {MEMORY: memory["actor"]})
    seen = {name: np.asarray(x).reshape(-1, *x.shape[2:]) for name, x in leaves.items()}
    return as_read(spec, seen), bool(clips.all())


def steps_to_observe(spec: Spec, space: gymnasium.Space) -> int:
    """Return the number of steps of 16 environments; fewer where pictures have to be drawn."""
    if spec.remembers:
        return _NUM_CONSECUTIVE
    leaves = leaves_of(space)
    size = sum(math.prod(leaves[name].shape) for name in spec.images)
    return max(1, min(_NUM_STEPS // 2, _IMAGE_BYTES // (size * _NUM_ENVS))) if size else _NUM_STEPS


def as_read(spec: Spec, seen: Mapping[str, NDArray[Any]]) -> Arrays:
    """Observations in the dtypes of an export: images and text as they are, everything else as float32."""
    return {name: x if name in spec.bytes_read else x.astype(np.float32) for name, x in seen.items()}


def leaves_of(obs: Any) -> dict[str, Any]:
    """List the observation's arrays by dotted path, sorted at each level; ``{"obs": obs}`` if it is one array."""
    if not isinstance(obs, Mapping | gymnasium.spaces.Dict):
        return {WHOLE: obs}
    found: dict[str, Any] = {}
    for name in sorted(obs):
        node = obs[name]
        nested = isinstance(node, Mapping | gymnasium.spaces.Dict)
        found |= {f"{name}.{path}": x for path, x in leaves_of(node).items()} if nested else {name: node}
    return found


def nest(leaves: Mapping[str, Any]) -> PyTree:
    """Nest arrays by their dotted paths: the inverse of ``leaves_of``."""
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


def feature_ranges(seen: Arrays, space: gymnasium.Space, spec: Spec) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """(low, high) [F] of the numbers: the space's bounds where they are finite, the range seen where they are not."""
    ranges = {}
    for name, box in leaves_of(space).items():
        if name in spec.images or name not in spec.observation:
            continue
        low, high = seen[name].min(axis=0), seen[name].max(axis=0)
        if isinstance(box, gymnasium.spaces.Box):
            low, high = (np.where(np.isfinite(b), b, s) for b, s in ((box.low, low), (box.high, high)))
        ranges[name] = (low.astype(np.float32), high.astype(np.float32))
    return ranges


def plain_answer(
    policy: Policy, params: Params, obs: PyTree, bounds: Bounds | None, memory: Array | None = None
) -> tuple[Array, ...]:
    """Answer as a deployed policy: the mode, clipped, the distribution's parameters, and the memory after it.

    Of a flow: where it leads from ``obs["noise"]``, clipped, and the same as it is. Zeros lead to the mode.
    """
    distribution, _, after = apply_policy(policy, params, obs, {"actor": memory})
    outputs = _outputs(distribution, obs, bounds)
    return outputs if memory is None else (*outputs, after["actor"])


deployed_answer = jax.jit(plain_answer, static_argnames=("policy", "bounds"))


def _outputs(distribution: Any, obs: PyTree, bounds: Bounds | None) -> tuple[Array, ...]:
    if isinstance(distribution, FlowChunk) and isinstance(obs, dict) and NOISE in obs:
        end = distribution.from_noise(obs[NOISE])
        return clip(end, bounds), end
    action = distribution.mode()
    if isinstance(distribution, Categorical):
        return action, distribution.logits
    if isinstance(distribution, MultiCategorical):
        return action, jnp.concatenate([part.logits for part in distribution.parts], axis=-1)
    normal = distribution.base if isinstance(distribution, TanhNormal) else distribution
    if not isinstance(normal, Normal):  # of one's own
        return (clip(action, bounds),)
    return clip(action, bounds), normal.mean, normal.log_std


def _step_answer(policy: Policy, params: Params, leaves: Mapping[str, Any], bounds: Bounds | None) -> Any:
    remembers = isinstance(policy, PolicyWithMemory)
    obs = {name: x for name, x in leaves.items() if name != MEMORY or not remembers}
    return deployed_answer(policy, params, nest(obs), bounds, leaves[MEMORY] if remembers else None)


@partial(jax.jit, static_argnames=("policy", "bounds"))
def _loop_answer(policy: Policy, params: Params, leaves: Mapping[str, Any], bounds: Bounds | None) -> Any:
    """``_step_answer`` step by step, each with the memory that the one before gave; an episode starts at zeros."""

    def one_step(memory: Array, leaves: dict[str, Array]) -> tuple[Array, Any]:
        memory = jnp.where(leaves[MEMORY].any(), memory, 0.0)
        row = {name: x[None] for name, x in {**leaves, MEMORY: memory}.items()}
        outputs = [y[0] for y in _step_answer(policy, params, row, bounds)]
        return outputs[-1], outputs

    return jax.lax.scan(one_step, jnp.zeros_like(leaves[MEMORY][0]), dict(leaves))[1]


def clip(action: Array, bounds: Bounds | None) -> Array:
    if bounds is None:
        return action
    low, high = (jnp.broadcast_to(jnp.asarray(bound, action.dtype), action.shape) for bound in bounds)
    return jnp.clip(action, low, high)


def _answer(policy: Policy, params: Params, spec: Spec, obs: Arrays) -> tuple[Arrays, Arrays]:
    """JAX's answers, and the errors that are allowed against them.

    Args:
        obs: what the policy itself takes, by path: numbers, images, text.
    """
    rows = len(next(iter(obs.values())))
    size = max(1, _CHUNK_BYTES // sum(map(math.prod, spec.images.values()))) if spec.images else rows
    chunks = [{name: x[start : start + size] for name, x in obs.items()} for start in range(0, rows, size)]
    answers = [_answer_to_chunk(policy, params, spec, chunk) for chunk in chunks]
    expected, allowed = (
        {name: np.concatenate([answer[i][name] for answer in answers]) for name in answers[0][i]} for i in (0, 1)
    )
    return expected, allowed


def _answer_to_chunk(
    policy: Policy, params: Params, spec: Spec, obs: Arrays, answer: Callable[..., Any] = _step_answer
) -> tuple[Arrays, Arrays]:
    # the proof is for float32, independent of the precision of training
    with jax.default_matmul_precision("highest"):
        outputs = answer(policy, params, obs, spec.clip)
        with jax.enable_x64(True):
            exact, *disturbed = _disturbed_answers(policy, params, spec, obs, answer)
    expected = dict(zip(spec.outputs, map(np.asarray, outputs), strict=True))
    allowed = {}
    for i, (name, y) in enumerate(expected.items()):
        if y.dtype == np.float32:
            others = np.stack([y, *(answer[i] for answer in disturbed)])
            allowed[name] = allowed_error(y, np.abs(others - exact[i]).max(axis=0))
    return expected, allowed


def _disturbed_answers(
    policy: Policy, params: Params, spec: Spec, obs: Arrays, answer: Callable[..., Any]
) -> list[list[NDArray[Any]]]:
    """Answers in float64: the exact ones, then those to numbers that are off, see ``interop.artefacts.parity``.

    Bytes of a text are what they are, and so are pixels that the policy takes without rounding.
    """
    rng = np.random.default_rng(1)
    whole = {name for name, x in obs.items() if x.dtype == np.uint8 and name not in spec.images}
    if not spec.pixels_round:
        whole |= spec.images.keys()
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64) if _is_float(x) else x, params)
    leaves = {name: x if name in whole else np.asarray(x, np.float64) for name, x in obs.items()}

    def disturb(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x * (1.0 + rng.choice((-_EPSILON, _EPSILON), x.shape))

    def disturb_image(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return x + rng.choice((-_EPSILON, _EPSILON), x.shape) * np.maximum(x, np.abs(x - 127.5))

    def disturb_part(name: str, x: NDArray[Any]) -> NDArray[Any]:
        if name in whole:
            return x
        return disturb_image(x) if name in spec.images else disturb(x)

    def disturbed() -> tuple[Params, PyTree]:
        moved = jax.tree.map(lambda x: disturb(x) if _is_float(x) else x, weights)
        return moved, {name: disturb_part(name, x) for name, x in leaves.items()}

    draws = [(weights, leaves), *(disturbed() for _ in range(_NUM_DISTURBED))]
    return [[np.asarray(y) for y in answer(policy, *draw, spec.clip)] for draw in draws]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@partial(jax.jit, static_argnames=("policy", "env", "bounds", "num_steps", "check_every"))
def _act(
    policy: Policy, env: Env, params: Params, key: Key, *, bounds: Bounds | None, num_steps: int, check_every: int
) -> tuple[PyTree, Array]:
    """Observations [T, N, ...], and whether the environment clipped [T], true where that was not checked."""
    key_reset, key_steps = jax.random.split(key)

    def one_step(carry: EnvCarry, now: tuple[Array, Key]) -> tuple[EnvCarry, tuple[PyTree, Array]]:
        t, key = now
        key_action, key_env = jax.random.split(key)
        distribution, _, remembered = apply_policy(policy, params, carry.obs, carry.memory)
        action = distribution.env_action(distribution.sample(key_action))
        after, timestep = step(env, carry, action, key_env)
        # as in ``unroll``: rows that ended forget
        after = replace(after, memory=forget(policy, remembered, timestep.terminated | timestep.truncated))
        clips = jnp.bool_(False)
        if bounds is not None:
            check = partial(_clips, env, carry, action, key_env, bounds)
            clips = jax.lax.cond(t % check_every == 0, check, lambda: jnp.bool_(True))
        return after, ((carry.obs, carry.memory), clips)

    start = with_memory(reset(env, key_reset, _NUM_ENVS), policy)
    _, (obs, clips) = jax.lax.scan(one_step, start, (jnp.arange(num_steps), jax.random.split(key_steps, num_steps)))
    return obs, clips


def _clips(env: Env, carry: EnvCarry, action: Array, key: Key, bounds: Bounds) -> Array:
    """Check that actions far beyond the bounds, on the sides that ``action`` leans to, do what clipped ones do."""
    low, high = (jnp.broadcast_to(jnp.asarray(bound, action.dtype), action.shape) for bound in bounds)
    beyond = jnp.where(action < (low + high) / 2.0, low - (high - low), high + (high - low))
    # as a loop, one program for both: of two, XLA may round one otherwise
    both = jax.lax.map(lambda a: step(env, carry, a, key)[1], jnp.stack((beyond, clip(beyond, bounds))))
    equal = jax.tree.map(lambda x: (x[0] == x[1]).all(), (both.final_obs, both.reward))
    return jnp.stack(jax.tree.leaves(equal)).all()
