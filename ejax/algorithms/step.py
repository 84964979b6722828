"""Training steps, ``RunState -> (RunState, metrics)``: what a run carries, and what surrounds an algorithm's update."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ejax.algorithms.record import ResetPolicy
from ejax.algorithms.replay_buffer import Replay, drop_tails, put_back
from ejax.numerics.episodes import (
    EpisodeStats,
    drop_current_episodes,
    episode_metrics,
    init_episode_stats,
    track_episodes,
)
from ejax.numerics.reward_scale import RewardScale, drop_current_rewards, init_reward_scale, scale_rewards
from ejax.rollout import EnvCarry, reset, restart, unroll, with_memory
from ejax.types import (
    Array,
    Env,
    ExploringPolicy,
    Key,
    Metrics,
    Policy,
    PyTree,
    Rollout,
    Timestep,
    TrainState,
    brief,
    init_train_state,
)


@struct.dataclass(kw_only=True)
class RunState:
    """All that a run needs to continue. Arrays only; a checkpoint is this and a description."""

    update: Array
    """Updates done, int32; with the seed it gives the random numbers of the next one."""
    train: TrainState
    envs: PyTree = ()
    """``EnvCarry``; of host environments what they can save."""
    episodes: EpisodeStats
    reward_scale: RewardScale | None = None
    """Divides rewards before an update sees them. None: they are as they come."""
    own: PyTree = ()
    """State of the algorithm besides its ``TrainState``, such as a replay buffer; see ``Algorithm.make_own``."""
    source: PyTree = ()
    """The demonstrations that a run that clones has drawn from."""

    __repr__ = brief


Step: TypeAlias = Callable[[RunState, Key], tuple[RunState, Metrics]]
Learn: TypeAlias = Callable[[RunState, Rollout, Key], tuple[RunState, Metrics]]
Update: TypeAlias = Callable[..., tuple[TrainState, Metrics]]
"""``(state, rollout, key, *, policy, optimizer, config) -> (state, metrics)``: ``ppo_update``, ``grpo_update``, or one
of your own. The state of an algorithm with ``make_own`` is ``(TrainState, own)``."""


def drop_episodes(state: RunState) -> RunState:
    """Forget the episodes under way, as after a forced reset."""
    scale = state.reward_scale
    return replace(
        state,
        episodes=drop_current_episodes(state.episodes),
        reward_scale=None if scale is None else drop_current_rewards(scale),
        own=drop_tails(state.own),
    )


def init_run_state(
    policy: Policy, env: Env, optimizer: optax.GradientTransformation, key: Key, *, num_envs: int, **keeps: bool
) -> RunState:
    """Make fresh parameters and episodes. ``keeps``: the last options of ``init_host_run_state``."""
    envs = _first_episodes(policy, env, key, num_envs)
    return replace(init_host_run_state(policy, optimizer, key, envs.obs, **keeps), envs=envs)


def spread_episodes(env: Env, envs: EnvCarry, key: Key) -> EnvCarry:
    """Count each environment's steps from a random one on: ``episode_step``, wherever it is in the state. ValueError:
    it is not there."""
    key_steps = jax.random.split(key, 3)[2]  # the others make parameters and episodes
    num_envs = jax.tree.leaves(envs.obs)[0].shape[0]
    step = jax.random.randint(key_steps, (num_envs,), 0, max(1, env.max_episode_steps), jnp.int32)

    def counts(path: tuple[Any, ...]) -> bool:
        return getattr(path[-1], "name", None) == "episode_step"

    if not any(counts(path) for path, _ in jax.tree_util.tree_leaves_with_path(envs.state)):
        raise ValueError(f"{type(env).__name__} has no episode_step in its state, which would start at a random step")
    state = jax.tree_util.tree_map_with_path(lambda path, x: step if counts(path) else x, envs.state)
    return replace(envs, state=state)


# Jitted, and so kept between processes: run operation by operation, a start would spend seconds compiling each of them.
# The episodes are a separate program, since JAX keeps none that calls back to the host, as the C engine's do.


@partial(jax.jit, static_argnames=("policy", "env", "num_envs"))
def _first_episodes(policy: Policy, env: Env, key: Key, num_envs: int) -> EnvCarry:
    _, key_envs = jax.random.split(key)
    return with_memory(reset(env, key_envs, num_envs), policy)


@partial(jax.jit, static_argnames=("policy", "optimizer", "reference", "target", "scales_rewards"))
def init_host_run_state(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    key: Key,
    obs: PyTree,
    *,
    reference: bool = False,
    target: bool = False,
    scales_rewards: bool = False,
) -> RunState:
    """Make fresh parameters; the environments are elsewhere, and reset by their collector. ``obs``: any observations,
    leaves [N, ...]; ``reference`` and ``target``: see ``init_train_state``; ``scales_rewards``: with a
    ``reward_scale``."""
    key_params, _ = jax.random.split(key)  # the other one draws the first episodes
    num_envs = jax.tree.leaves(obs)[0].shape[0]
    return RunState(
        update=jnp.zeros((), jnp.int32),
        train=init_train_state(policy, optimizer, key_params, obs, reference=reference, target=target),
        episodes=init_episode_stats(num_envs),
        reward_scale=init_reward_scale(num_envs) if scales_rewards else None,
    )


def make_rollout_step(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: Any,
    *,
    update: Update,
    resets: ResetPolicy,
    num_steps: int,
    dropout: bool,
) -> Step:
    """Make a step that collects T steps of all environments, and learns from them."""
    learn = make_learn(policy, optimizer, config, update=update, resets=resets)

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        key_collect, key_update, key_reset = jax.random.split(key, 3)
        envs = state.envs
        if resets.restart:
            start = reset(env, key_reset, state.episodes.current_return.shape[0], resets.group_size)
            envs = with_memory(restart(env, envs, start, resets.group_size), policy)
        rollout, envs = unroll(
            policy,
            env,
            state.train.params,
            envs,
            key_collect,
            num_steps=num_steps,
            dropout=dropout,
            first_episodes=resets.restart and resets.first_only,
            **({"first_step": state.update * num_steps} if isinstance(policy, ExploringPolicy) else {}),
        )
        state, metrics = learn(state, rollout, key_update)
        return replace(state, envs=envs), metrics

    return step


def make_learn(
    policy: Policy, optimizer: optax.GradientTransformation, config: Any, *, update: Update, resets: ResetPolicy
) -> Learn:
    """Make an update from a rollout: of the ``TrainState``, and of the algorithm's own state, if it keeps any;
    ``state.envs`` is left as it is."""
    static = {"policy": policy, "optimizer": optimizer, "config": config}

    def learn(state: RunState, rollout: Rollout, key: Key) -> tuple[RunState, Metrics]:
        state = drop_episodes(state) if resets.restart else state
        scaled = rollout
        if state.reward_scale is not None:  # logs have rewards as they came
            steps = (rollout.reward, rollout.done, rollout.valid)
            scale, reward = scale_rewards(state.reward_scale, *steps, gamma=config.gamma)
            state, scaled = replace(state, reward_scale=scale), replace(rollout, reward=reward)
        if jax.tree.leaves(state.own):
            both, losses = update((state.train, state.own), scaled, key, **static)
            train, own = cast(tuple[TrainState, PyTree], both)
        else:
            (train, losses), own = update(state.train, scaled, key, **static), state.own
        return finish(replace(state, train=train, own=own), rollout, losses, rollout.valid)

    return learn


def finish(
    state: RunState, seen: Rollout | Timestep, losses: Metrics, valid: Array | None = None
) -> tuple[RunState, Metrics]:
    """Count the update and its episodes; return all metrics of the step under their tags.

    Args:
        seen: leaves [T, N, ...].
        losses: of the update, ``train/<name>``; those of another group have its name, such as ``model/<name>``.
        valid: [T, N] bool, the steps that count. None: all.
    """
    success = seen.info.get("success", jnp.full(seen.reward.shape, jnp.nan))
    episodes = track_episodes(state.episodes, seen.reward, seen.done, success, valid)
    metrics = {name if "/" in name else f"train/{name}": value for name, value in losses.items()}
    metrics |= episode_metrics(episodes) | step_metrics(seen.info, valid)
    return replace(state, update=state.update + 1, episodes=episodes), metrics


def step_metrics(info: dict[str, Any], valid: Array | None) -> Metrics:
    """Average what the env reports at each step over the rollout: ``rewards/<term>``, weighted, ``terms/<term>`` before
    its weight, and ``metrics/<name>``."""
    return {
        f"{group}/{name}": x.mean(where=valid)
        for group in ("rewards", "terms", "metrics")
        for name, x in info.get(group, {}).items()
        if x.ndim == 2  # [T, N]: one number for each env
    }


def repeat_step(
    step: Callable[[Any, Key], tuple[Any, Metrics]],
    max_repeats: int,
    *,
    fold: Callable[[Key, Array], Key] = jax.random.fold_in,
    out_shardings: Any = None,
) -> Any:
    """Jit ``(state, seed key, n, replays) -> (state, metrics)``: n ≤ max_repeats steps in one dispatch, n a traced
    number. A run's numbers do not depend on where its dispatches were cut: step number k draws from
    ``fold_in(seed key, k)``. The replay buffers of the state, if any, are consumed: see ``take_out``.

    Args:
        step: of a ``RunState``, or of another state that has an ``update``.
        fold: gives the key of an update from the seed key.

    Returns:
        Metrics are [max_repeats, ...], of which the first n are set.
    """

    def repeated(state: Any, key: Key, num_repeats: Array, replays: Sequence[Replay] = ()) -> tuple[Any, Metrics]:
        state = put_back(state, replays)

        def body(i: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
            state, log = carry
            state, metrics = step(state, fold(key, state.update))
            return state, {name: log[name].at[i].set(value) for name, value in metrics.items()}

        shapes = jax.eval_shape(step, state, key)[1]
        # of a fixed size, as n is traced; what stays NaN was not reached
        log = {name: jnp.full((max_repeats, *x.shape), jnp.nan, x.dtype) for name, x in shapes.items()}
        with jax.named_scope("updates"):
            return jax.lax.fori_loop(0, num_repeats, body, (state, log))

    return jax.jit(repeated, out_shardings=out_shardings, donate_argnames="replays")
