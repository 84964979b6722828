"""Behaviour cloning: the actions of demonstrations become likely, or near to the policy's mean.

    nll   L = −E[log π(a | o)]
    mse   L = E[‖mode π(· | o) − a‖² / A]
    flow  that of ``ejax.policies.vla.flow``, for a policy that is one

A policy of action chunks, [K·A] at one observation, is taught at frame t the actions of frames t … t + K − 1; those
beyond the window have no part in the expectation, which is over single actions. A policy with memory reads a window
frame by frame, from an episode's first memory; of windows around a frame (``ejax.data.chunks``) it is not taught what
was before it, and what lies beyond the episode has no part in memory, loss or statistics.
Source: Pomerleau 1988 (ALVINN); Zhao et al. 2023 (ACT) for chunks.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from ejax.algorithms.options import GradientOptions, indivisible, shared_minibatches
from ejax.algorithms.record import Algorithm, RunShape
from ejax.algorithms.sgd import Batch, sgd_epochs
from ejax.optim import get_learning_rate, step_schedule
from ejax.policies.normalize import update_normalizer
from ejax.runtime.sharding import num_shards
from ejax.schema.problems import Problem
from ejax.types import (
    Array,
    Env,
    HostEnv,
    Key,
    Metrics,
    Params,
    Policy,
    PolicyWithMemory,
    PredictingPolicy,
    PyTree,
    ReadingPolicy,
    TrainState,
)


class BCConfig(GradientOptions):
    """``algorithm.cfg`` of ``bc``. EmbodiChain has no such algorithm."""

    loss: Literal["nll", "mse", "flow"] = "nll"
    """``mse`` leaves the standard deviation as it is; ``flow`` is that of a ``vla`` policy with a flow head."""
    batch_size: PositiveInt = 256
    """Windows of ``data.chunk_size`` frames in one gradient step, on each device."""
    minibatch_strata: PositiveInt | None = None
    """Gradient steps take equally many windows from each of this many equal parts of an update's. None: from each
    device's; D devices compute what one does with D strata."""
    updates_per_step: PositiveInt = 16
    """Gradient steps between two looks at the metrics, each with different windows: one update of the run."""
    frames_per_window: PositiveInt | None = None
    """Frames of each window that the policy is applied to, since neighbouring pictures show little more than one: the
    first, and others drawn at random. (Of random ones alone few would be from where an episode begins.) None: all."""
    prediction_coef: NonNegativeFloat = 1.0
    """Weight of the mean squared error of a policy's predictions (``vla_config.model_config.predicts``), in the units
    of those parts squared."""
    word_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of an instruction's words that a ``vla`` policy does not get to read, drawn for each frame: so it learns to
    do without some, as it must where an instruction has words that it was not taught."""
    max_grad_norm: PositiveFloat = Field(default=1.0, allow_inf_nan=True)
    """Infinity: no clipping."""


_MASKS = ("valid", "loss_mask")


@partial(jax.jit, static_argnames=("policy", "optimizer", "config", "dropout"))
def bc_update(
    state: TrainState,
    batch: Batch,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: BCConfig,
    dropout: bool = False,
) -> tuple[TrainState, Metrics]:
    """Make ``updates_per_step`` gradient steps and one of the schedule. Normalizers see the observations first.

    Args:
        batch: ``obs`` and ``action``, leaves [R, C, ...]: C successive frames of one episode each, R =
            ``updates_per_step`` · ``batch_size`` · devices. Of windows around a frame also ``valid`` and ``loss_mask``
            [R, C] bool: the frames that exist, and those of them that are taught.

    Returns:
        The new state (``step`` + 1) and scalar metrics.
    """
    key_dropout, key_order = jax.random.split(key)
    rows: Batch = {name: batch[name] for name in ("obs", "action", *_MASKS) if name in batch}
    num_windows, num_frames = batch["action"].shape[:2]
    if config.frames_per_window is not None and config.frames_per_window < num_frames:
        rows |= _choose_frames(rows, jax.random.fold_in(key, 2), config.frames_per_window)
    if config.word_dropout > 0.0 and (part := _text_part(policy)) is not None:
        from ejax.policies.vla.words import forget_words  # of the VLA wing alone

        text = forget_words(rows["obs"][part], jax.random.fold_in(key, 4), config.word_dropout)
        rows["obs"] = {**rows["obs"], part: text}
    if dropout:
        rows["dropout_seed"] = jax.random.bits(key_dropout, batch["action"].shape[:2], jnp.uint32)
    if config.loss == "flow":
        # a number for each use: an option changes no other draw
        rows["noise_seed"] = jax.random.bits(jax.random.fold_in(key, 3), (num_windows,), jnp.uint32)
    if "loss_mask" in rows:
        rows["mask"] = _num_taught(policy, state.params, rows)  # windows weigh what they teach
    state = replace(state, params=update_normalizer(policy, state.params, rows["obs"], _taught(rows)))
    state, metrics = sgd_epochs(
        state,
        rows,
        key_order,
        loss=partial(bc_loss, policy=policy, config=config),
        optimizer=optimizer,
        minibatches=config.minibatches_of(
            num_shards() * config.batch_size, n_epochs=1, num_strata=config.minibatch_strata or num_shards()
        ),
    )
    state = step_schedule(state, config.optimizer, config.lr_scheduler)
    return state, metrics | {"learning_rate": get_learning_rate(state.opt_state)}


def _choose_frames(rows: Batch, key: Key, count: int) -> Batch:
    """Draw ``count`` frames of each window, the first among them: their observations and numbers, [R, count, ...]."""
    num_windows, num_frames = rows["action"].shape[:2]
    others = 1 + jnp.argsort(jax.random.uniform(key, (num_windows, num_frames - 1)), axis=1)  # without repetition
    frame = jnp.concatenate([jnp.zeros((num_windows, 1), others.dtype), others[:, : count - 1]], axis=1)
    return {"obs": jax.tree.map(lambda x: _at(x, frame), rows["obs"]), "frame": frame}


def _at(x: Array, frame: Array | None) -> Array:
    """Take frames of each window: [B, C, ...] -> [B, F, ...]. None: all."""
    return x if frame is None else x[jnp.arange(len(x))[:, None], frame]


def bc_loss(params: Params, batch: Batch, *, policy: Policy, config: BCConfig) -> tuple[Array, Metrics]:
    """Compute the loss of one minibatch (or of a part of it), and metrics: weighted means over single actions.

    Args:
        batch: ``obs``, ``action`` with leaves [B, C, ...]; optional ``frame`` [B, F], the frames of the window that
            ``obs`` [B, F, ...] are of; ``weight`` [B], of sum one over a minibatch (default: shares in the taught
            actions); ``dropout_seed`` [B, C]; ``noise_seed`` [B] for the loss ``flow``; ``valid`` and ``loss_mask`` [B,
            C], see ``bc_update``.

    Raises:
        ValueError: a loss that is not for these actions or this policy; a policy whose actions are not a whole number
            of these.
    """
    action, frame, loss_mask, taught = batch["action"], batch.get("frame"), batch.get("loss_mask"), _taught(batch)
    seed = {"dropout_seed": _at(batch["dropout_seed"], frame)} if "dropout_seed" in batch else {}
    distribution, predicted = _in_windows(policy, params, batch["obs"], seed, batch.get("valid"))
    continuous, is_flow = jnp.issubdtype(action.dtype, jnp.floating), distribution.is_flow
    if config.loss == "mse" and not continuous:
        raise ValueError(f"loss 'mse' needs continuous actions, got {action.dtype}; set algorithm.cfg.loss to nll")
    if is_flow != (config.loss == "flow"):
        text = f"loss '{config.loss}' does not fit this policy's distribution"
        raise ValueError(f"{text}; set algorithm.cfg.loss to {'flow' if is_flow else 'nll or mse'}")
    if continuous:
        each, width = action.shape[-1], distribution.spec.taught_size if is_flow else distribution.mode().shape[-1]
        if width % each:
            text = f"the policy has actions of {width} numbers, which is not a multiple of the demonstrations' {each}"
            raise ValueError(text)
        size = width // each
        target, known = chunk_targets(action, size, frame, loss_mask)
    else:
        target = _at(action, frame)
        known = jnp.ones((*target.shape[:2], 1)) if taught is None else taught[..., None].astype(jnp.float32)
    weight, share = _shares(batch, known)

    def mean(x: Array) -> Array:
        return jnp.sum(share * x.reshape(known.shape))

    if is_flow:
        # a minibatch's noise is that of its first row: rows are drawn in a new order each time
        key = jax.random.key(batch["noise_seed"][0])
        metrics = {"flow": mean(distribution.matching_loss(target, key).mean(axis=-1))}
    else:
        if continuous:  # a distribution over chunks [B, F, K·A] is one over their actions [B, F, K, A]
            distribution = jax.tree.map(lambda x: x.reshape(*x.shape[:-1], size, each), distribution)
        metrics = {"nll": mean(-distribution.log_prob(target)), "entropy": mean(distribution.entropy())}
        if continuous:
            metrics["mse"] = mean(jnp.square(distribution.mode() - target).mean(axis=-1))
    loss = metrics[config.loss]
    if predicted:
        metrics["prediction"] = _prediction_error(predicted, batch["obs"], weight, taught)
        loss = loss + config.prediction_coef * metrics["prediction"]
    return loss, jax.lax.stop_gradient(metrics)


def _shares(batch: Batch, known: Array) -> tuple[Array, Array]:
    """Share the weight of each window [B] among the single actions that are ``known`` [B, F, K]."""
    num_rows, num_frames = batch["action"].shape[:2]
    if "loss_mask" in batch:
        num_taught = known.sum(axis=(1, 2))
        weight = batch.get("weight", num_taught / jnp.maximum(num_taught.sum(), 1.0))
        return weight, weight[:, None, None] * known / jnp.maximum(num_taught, 1.0)[:, None, None]
    weight = batch.get("weight", jnp.full(num_rows, 1.0 / num_rows))
    if "frame" in batch:  # on average over the frames that may be drawn besides the first
        left = np.minimum(known.shape[2], num_frames - np.arange(num_frames))
        num_known: Array | float = float(left[0] + (known.shape[1] - 1) * left[1:].mean())
    else:
        num_known = known[0].sum()
    return weight, weight[:, None, None] * known / num_known


def _taught(rows: Batch) -> Array | None:
    """Mark the frames of ``obs`` that are taught, [B, F] bool. None: all."""
    return _at(rows["loss_mask"], rows.get("frame")) if "loss_mask" in rows else None


def _num_taught(policy: Policy, params: Params, rows: Batch) -> Array:
    """Count the single actions that each window teaches, [R]."""
    action, frame, mask = rows["action"], rows.get("frame"), rows["loss_mask"]
    if not jnp.issubdtype(action.dtype, jnp.floating):
        return _at(mask, frame).sum(axis=1).astype(jnp.float32)

    def decision(params: Params, obs: PyTree) -> Any:
        return _in_windows(policy, params, obs, {})[0].mode()

    one = jax.tree.map(lambda x: x[:1], rows["obs"])
    size = jax.eval_shape(decision, params, one).shape[-1] // action.shape[-1]
    return chunk_targets(action, size, frame, mask)[1].sum(axis=(1, 2))


def _prediction_error(predicted: dict[str, Array], obs: PyTree, weight: Array, taught: Array | None) -> Array:
    """Average the squared error over windows by their weights, added up over parts."""
    squares = [jnp.square(each - obs[name]) for name, each in predicted.items()]
    if taught is None:
        errors = [square.mean(axis=tuple(range(1, square.ndim))) for square in squares]
    else:
        share = taught / jnp.maximum(taught.sum(axis=1, keepdims=True), 1)
        errors = [jnp.sum(share * square.mean(axis=tuple(range(2, square.ndim))), axis=1) for square in squares]
    return jnp.sum(weight * sum(errors[1:], errors[0]))


def _in_windows(
    policy: Policy, params: Params, obs: PyTree, seed: dict[str, Array], valid: Array | None = None
) -> tuple[Any, dict[str, Array]]:
    """Apply the policy at each frame of windows, [B, C, ...], that is ``valid``: distribution and predictions."""
    if isinstance(policy, PredictingPolicy) and policy.predicts:
        distribution, _, predicted = policy.apply(params, obs, predict=True, **seed)
        if missing := [name for name in policy.predicts if name not in predicted or name not in obs]:
            text = f"the demonstrations lack {', '.join(missing)} or its instruction, they have {', '.join(obs)}"
            raise ValueError(f"{text}; record it, or leave out model_config.predicts or asks")
        return distribution, {name: predicted[name] for name in policy.predicts}
    if not isinstance(policy, PolicyWithMemory):
        return policy.apply(params, obs, **seed)[0], {}
    steps = jax.tree.map(lambda x: x.swapaxes(0, 1), {"obs": obs, **seed})
    num_frames, num_windows = jax.tree.leaves(steps)[0].shape[:2]
    first = jnp.zeros((num_frames, num_windows), bool)  # a window is of one episode
    if valid is not None:  # which begins behind the padding
        first = first.at[1:].set(valid.T[1:] & ~valid.T[:-1])
    memory = policy.init_memory(num_windows)
    distribution = policy.apply(params, steps.pop("obs"), memory=memory, first=first, **steps)[0]
    return jax.tree.map(lambda x: x.swapaxes(0, 1), distribution), {}


def chunk_targets(
    action: Array, size: int, frame: Array | None = None, loss_mask: Array | None = None
) -> tuple[Array, Array]:
    """Make the targets of a policy of chunks at frames of a window, and a mask of the actions that it holds.

    Args:
        action: [B, C, A].
        size: K, actions of a chunk.
        frame: [B, F], the frames that chunks begin at. None: all, F = C.
        loss_mask: [B, C] bool, the frames that are taught. None: all.

    Returns:
        Targets [B, F, K, A], those beyond the window repeat its last action; known [B, F, K] float32, 1 inside it where
        both the chunk's first frame and the action's own are taught.
    """
    num_rows, num_frames = action.shape[:2]
    if frame is None:
        frame = jnp.broadcast_to(jnp.arange(num_frames), (num_rows, num_frames))
    each = frame[..., None] + jnp.arange(size)[None, None]
    rows, at = jnp.arange(num_rows)[:, None, None], jnp.minimum(each, num_frames - 1)
    known = (each < num_frames).astype(jnp.float32)
    if loss_mask is not None:
        known = known * (loss_mask[rows, at] & _at(loss_mask, frame)[..., None])
    return action[rows, at], known


def _problems(options: BCConfig, run: RunShape) -> Iterator[Problem]:
    if not run.distributed:  # how many devices there are is known when the run is built
        yield from indivisible(
            "minibatch_strata", options.minibatch_strata, options.batch_size, "algorithm.cfg.batch_size"
        )


def _env_problems(options: BCConfig, env: Env | HostEnv) -> Iterator[Problem]:
    if options.loss == "mse" and not isinstance(env.action_space, gymnasium.spaces.Box):
        text = f"got 'mse', but the environment's actions are choices: {env.action_space}; use nll"
        yield Problem("algorithm.cfg.loss", text)


def _policy_problems(options: BCConfig, policy: Policy) -> Iterator[Problem]:
    if options.frames_per_window is not None and isinstance(policy, PolicyWithMemory):
        text = f"got {options.frames_per_window}, but a policy with memory reads every frame; leave it out"
        yield Problem("algorithm.cfg.frames_per_window", text)
    if options.word_dropout > 0.0 and _text_part(policy) is None:
        text = f"got {options.word_dropout}, but the policy reads no words of the observation; leave it out"
        yield Problem("algorithm.cfg.word_dropout", text)


def _text_part(policy: Policy) -> str | None:
    return policy.text if isinstance(policy, ReadingPolicy) else None


def _sizes(options: BCConfig, chunk_size: int) -> dict[str, int]:
    """Count a run's steps in the frames that it learns: those of one update, from one stream."""
    return {"num_envs": 1, "buffer_size": options.batch_size * options.updates_per_step * chunk_size}


ALGORITHM = Algorithm(
    Config=BCConfig,
    update=bc_update,
    learns_from="demonstrations",
    sizes=_sizes,
    rescale_for_devices=lambda options, was, now: options.model_copy(update=shared_minibatches(options, was, now)),
    problems=_problems,
    env_problems=_env_problems,
    policy_problems=_policy_problems,
)
