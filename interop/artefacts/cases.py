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
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.collectors import collect_rollout
from ejax.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from ejax.envs.actions import ActionForm, to_action
from ejax.policies.calls import apply_policy
from ejax.policies.vla.flow import FlowChunk
from ejax.rollout import reset
from ejax.schema.paths import leaves as leaf_paths
from ejax.schema.paths import named, part_names
from ejax.schema.paths import nest as nest_parts
from ejax.types import Array, Env, HostEnv, Params, Policy, PolicyWithMemory, PyTree
from interop.artefacts.adversaries import adversarial_observations
from interop.artefacts.parity import allowed_error
from interop.standalone_verify import CONSECUTIVE, Arrays, Case
from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY, NOISE, WHOLE_OBS, Paths, PolicySpec, ProgramSpec

_NUM_ENVS, _NUM_STEPS = 16, 128
_NUM_CONSECUTIVE = 1000
_IMAGE_BYTES = 1024 * 64 * 64 * 3
"""Size of the environment's images: as many of 64x64 as the largest batch that is checked, fewer of larger ones."""
_CHUNK_BYTES = 2**22
"""Size of images that are answered at a time; activations take some thirty times as much."""
_NUM_DISTURBED = 8
_EPSILON = 2.0**-22


def draw_cases(
    policy: Policy,
    params: Params,
    spec: PolicySpec | ProgramSpec,
    seen: Arrays,
    space: gymnasium.Space,
    form: ActionForm,
) -> list[Case]:
    """Draw the cases that the module's text lists.

    Args:
        seen: observations of the environment, ``leaves_of`` them: [B, F] each, images [B, height, width, channels].
        space: of the observation; its finite bounds are edges too.
        form: of the actions, by which a run's policy acts; the artefacts have theirs from ``spec``.
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

    cases = answered(policy, params, spec, form, observations, narrowed)
    return cases if played is None else [*cases, _consecutive(policy, params, spec, form, played)]


def answered(
    policy: Policy,
    params: Params,
    spec: Spec,
    form: ActionForm,
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
    expected, allowed = _answer(policy, params, spec, form, together)
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


def _consecutive(policy: Policy, params: Params, spec: Spec, form: ActionForm, played: Arrays) -> Case:
    expected, allowed = _answer_to_chunk(policy, params, spec, form, played, answer=_loop_answer)
    # zeros mark an episode's first step: no memory of a later one is all zeros
    starts = ~played[MEMORY].any(axis=1, keepdims=True)
    before = np.concatenate([np.zeros_like(played[MEMORY][:1]), expected["next_memory"][:-1]])
    observation = {**played, MEMORY: np.where(starts, np.float32(0.0), before)}
    return Case(CONSECUTIVE, {name: observation[name] for name in spec.inputs}, expected, allowed)


def observe_env(policy: Policy, env: Env | HostEnv, params: Params, spec: Spec) -> Arrays:
    """Act in the environment with sampled actions, so that the observations spread as in training.

    Returns:
        The observations [B, ...] by path, with the actor's ``memory`` where it has one.
    """
    key_reset, key_steps = jax.random.split(jax.random.key(0))
    if isinstance(env, HostEnv):
        start = env.reset(np.random.SeedSequence(0).generate_state(env.num_envs).astype(np.uint32))
    else:
        start = reset(env, key_reset, _NUM_ENVS)
    num_steps = steps_to_observe(spec, env.observation_space)
    rollout, _ = collect_rollout(env, policy, params, start, key_steps, num_steps)
    leaves = leaves_of(rollout.obs) | ({} if rollout.memory is None else {MEMORY: rollout.memory["actor"]})
    return as_read(spec, {name: np.asarray(x).reshape(-1, *x.shape[2:]) for name, x in leaves.items()})


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
    return named(obs) if isinstance(obs, Mapping) else {WHOLE_OBS: obs}


def nest_inputs(leaves: Mapping[str, Any], paths: Paths) -> PyTree:
    """Nest arrays by their dotted paths: the inverse of ``leaves_of``. ``paths``: as a spec has them."""
    odd = dict(paths)
    if list(leaves) == [WHOLE_OBS] and not odd:
        return leaves[WHOLE_OBS]
    return nest_parts((odd.get(name, name.split(".")), x) for name, x in leaves.items())


def paths_of(obs: Any) -> Paths:
    """Return the keys of those arrays of an observation, or a space, whose names alone would nest otherwise."""
    paths = [path for path, _ in leaf_paths(obs) if path]
    names = part_names(paths)
    odd = (path != tuple(name.split(".")) or names == [WHOLE_OBS] for name, path in zip(names, paths, strict=True))
    return tuple(pair for pair, is_odd in zip(zip(names, paths, strict=True), odd, strict=True) if is_odd)


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
    policy: Policy, params: Params, obs: PyTree, form: ActionForm | Spec, memory: Array | None = None
) -> tuple[Array, ...]:
    """Answer as a deployed policy: the mode as an action, the distribution's parameters, and the memory after it.

    Of a flow: where it leads from ``obs["noise"]``, as an action, and the same as it is. Zeros lead to the mode.
    """
    distribution, _, after = apply_policy(policy, params, obs, {"actor": memory})
    outputs = _outputs(distribution, obs, form)
    return outputs if memory is None else (*outputs, after["actor"])


deployed_answer = jax.jit(plain_answer, static_argnames=("policy", "form"))


def _outputs(distribution: Any, obs: PyTree, form: ActionForm | Spec) -> tuple[Array, ...]:
    if isinstance(distribution, FlowChunk) and isinstance(obs, dict) and NOISE in obs:
        end = distribution.from_noise(obs[NOISE])
        return to_action(form, end, jnp), end
    action = distribution.mode()
    if isinstance(distribution, Categorical):
        return to_action(form, action, jnp), distribution.logits
    if isinstance(distribution, MultiCategorical):
        return to_action(form, action, jnp), jnp.concatenate([part.logits for part in distribution.parts], axis=-1)
    normal = distribution.base if isinstance(distribution, TanhNormal) else distribution
    if not isinstance(normal, Normal):  # a custom one
        return (to_action(form, action, jnp),)
    return to_action(form, action, jnp), normal.mean, normal.log_std


def _step_answer(policy: Policy, params: Params, leaves: Mapping[str, Any], form: ActionForm, paths: Paths) -> Any:
    remembers = isinstance(policy, PolicyWithMemory)
    obs = {name: x for name, x in leaves.items() if name != MEMORY or not remembers}
    return deployed_answer(policy, params, nest_inputs(obs, paths), form, leaves[MEMORY] if remembers else None)


@partial(jax.jit, static_argnames=("policy", "form", "paths"))
def _loop_answer(policy: Policy, params: Params, leaves: Mapping[str, Any], form: ActionForm, paths: Paths) -> Any:
    """``_step_answer`` step by step, each with the memory that the one before gave; an episode starts at zeros."""

    def one_step(memory: Array, leaves: dict[str, Array]) -> tuple[Array, Any]:
        memory = jnp.where(leaves[MEMORY].any(), memory, 0.0)
        row = {name: x[None] for name, x in {**leaves, MEMORY: memory}.items()}
        outputs = [y[0] for y in _step_answer(policy, params, row, form, paths)]
        return outputs[-1], outputs

    return jax.lax.scan(one_step, jnp.zeros_like(leaves[MEMORY][0]), dict(leaves))[1]


def _answer(policy: Policy, params: Params, spec: Spec, form: ActionForm, obs: Arrays) -> tuple[Arrays, Arrays]:
    """JAX's answers, and the errors that are allowed against them. ``obs``: what the policy itself takes, by path:
    numbers, images, text."""
    rows = len(next(iter(obs.values())))
    size = max(1, _CHUNK_BYTES // sum(map(math.prod, spec.images.values()))) if spec.images else rows
    chunks = [{name: x[start : start + size] for name, x in obs.items()} for start in range(0, rows, size)]
    answers = [_answer_to_chunk(policy, params, spec, form, chunk) for chunk in chunks]
    expected, allowed = (
        {name: np.concatenate([answer[i][name] for answer in answers]) for name in answers[0][i]} for i in (0, 1)
    )
    return expected, allowed


def _answer_to_chunk(
    policy: Policy, params: Params, spec: Spec, form: ActionForm, obs: Arrays, answer: Callable[..., Any] = _step_answer
) -> tuple[Arrays, Arrays]:
    answer = partial(answer, paths=spec.paths)
    smooth = form._replace(whole=False)
    # the proof is for float32, independent of the precision of training
    with jax.default_matmul_precision("highest"):
        outputs = answer(policy, params, obs, smooth)
        with jax.enable_x64(True):
            exact, *disturbed = _disturbed_answers(policy, params, spec, smooth, obs, answer)
    expected = dict(zip(spec.outputs, map(np.asarray, outputs), strict=True))
    allowed = {}
    for i, (name, y) in enumerate(expected.items()):
        if y.dtype == np.float32:
            others = np.stack([y, *(answer[i] for answer in disturbed)])
            sensitivity = np.abs(others - exact[i]).max(axis=0)
            allowed[name] = allowed_error(y.reshape(len(y), -1), sensitivity.reshape(len(y), -1))
    if form.whole:
        low, high = (np.rint(expected["action"] + sign * allowed["action"]) for sign in (-1.0, 1.0))
        allowed["action"] = np.fmax(allowed["action"], (high - low).max(axis=-1, keepdims=True))  # see without_ties
        expected["action"] = to_action(form, expected["action"])
    return expected, allowed


def _disturbed_answers(
    policy: Policy, params: Params, spec: Spec, form: ActionForm, obs: Arrays, answer: Callable[..., Any]
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
    return [[np.asarray(y) for y in answer(policy, *draw, form)] for draw in draws]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
