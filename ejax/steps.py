"""Training steps: RunState -> (RunState, metrics), each one jitted program."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ejax.algorithms.apg import APGConfig, apg_update_with_trajectory
from ejax.algorithms.differentiable import Trajectory
from ejax.algorithms.grpo import GRPOConfig, grpo_update
from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.algorithms.shac import SHACConfig, shac_update_with_trajectory
from ejax.episodes import (
    EpisodeStats,
    drop_current_episodes,
    episode_metrics,
    init_episode_stats,
    track_episodes,
)
from ejax.types import Array, Env, Key, Metrics, Policy, PyTree, Rollout, TrainState
from ejax.unroll import reset, unroll


@struct.dataclass(kw_only=True)
class RunState:
    """All that a run needs to go on. Arrays only; a checkpoint is this and a description."""

    update: Array
    """Updates done, int32; with the seed it gives the random numbers of the next one."""
    train: TrainState
    envs: PyTree
    """``EnvCarry``; of host environments what they can save, or ()."""
    episodes: EpisodeStats


Step: TypeAlias = Callable[[RunState, Key], tuple[RunState, Metrics]]
Learn: TypeAlias = Callable[[RunState, Rollout, Key], tuple[RunState, Metrics]]


def init_run_state(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    key: Key,
    *,
    num_envs: int,
    keep_reference: bool = False,
) -> RunState:
    """Fresh parameters, fresh episodes.

    Args:
        keep_reference: also keep the first parameters, for algorithms that stay close to them.
    """
    key_params, key_envs = jax.random.split(key)
    envs = reset(env, key_envs, num_envs)
    return _first_state(policy, optimizer, key_params, envs.obs, envs, keep_reference)


def init_host_run_state(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    key: Key,
    obs: PyTree,
    *,
    keep_reference: bool = False,
) -> RunState:
    """Fresh parameters; the environments are elsewhere, and reset by their collector.

    Args:
        obs: any observations, leaves [N, ...].
    """
    key_params, _ = jax.random.split(key)
    return _first_state(policy, optimizer, key_params, obs, (), keep_reference)


def _first_state(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    key: Key,
    obs: PyTree,
    envs: PyTree,
    keep_reference: bool,
) -> RunState:
    params = policy.init(key, obs)
    num_envs = jax.tree.leaves(obs)[0].shape[0]
    train = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params["params"]),
        reference=params if keep_reference else None,
    )
    return RunState(update=jnp.zeros((), jnp.int32), train=train, envs=envs, episodes=init_episode_stats(num_envs))


def make_ppo_step(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: PPOConfig,
    *,
    num_steps: int,
    dropout: bool,
) -> Step:
    """Collect T steps of all environments, update."""

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        key_collect, key_update = jax.random.split(key)
        rollout, envs = unroll(
            policy, env, state.train.params, state.envs, key_collect, num_steps=num_steps, dropout=dropout
        )
        train, losses = ppo_update(state.train, rollout, key_update, policy=policy, optimizer=optimizer, config=config)
        return _finish(state, train, envs, state.episodes, _seen(rollout), losses)

    return step


def make_grpo_step(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: GRPOConfig,
    *,
    num_steps: int,
    dropout: bool,
) -> Step:
    """Start new episodes (unless told not to), collect T steps, update.

    Where only first episodes count and none goes on into the next rollout, nothing is simulated after them.
    """
    first_episodes = config.reset_every_rollout and config.truncate_at_first_done

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        key_collect, key_update, key_reset = jax.random.split(key, 3)
        envs, episodes = state.envs, state.episodes
        if config.reset_every_rollout:
            num_envs = episodes.current_return.shape[0]
            envs = reset(env, key_reset, num_envs, config.group_size if config.shared_start else 1)
            episodes = drop_current_episodes(episodes)
        rollout, envs = unroll(
            policy,
            env,
            state.train.params,
            envs,
            key_collect,
            num_steps=num_steps,
            dropout=dropout,
            first_episodes=first_episodes,
        )
        train, losses = grpo_update(state.train, rollout, key_update, policy=policy, optimizer=optimizer, config=config)
        return _finish(state, train, envs, episodes, _seen(rollout), losses, rollout.extras.get("valid"))

    return step


def make_apg_step(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: APGConfig,
    *,
    num_steps: int,
    dropout: bool,
) -> Step:
    """Differentiate through ``update_horizon`` steps, update."""
    del num_steps, dropout  # the config has the horizon; actions are not evaluated a second time

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        train, envs, losses, trajectory = apg_update_with_trajectory(
            state.train, state.envs, key, policy=policy, env=env, optimizer=optimizer, config=config
        )
        episodes = state.episodes
        if config.rollout_mode == "complete":
            episodes = drop_current_episodes(episodes)
        return _finish(state, train, envs, episodes, trajectory, losses)

    return step


def make_shac_step(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: SHACConfig,
    *,
    num_steps: int,
    dropout: bool,
) -> Step:
    """Differentiate through ``segment_length`` steps and the value after them, update the actor, then the critic."""
    del num_steps, dropout  # as in APG

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        train, envs, losses, trajectory = shac_update_with_trajectory(
            state.train, state.envs, key, policy=policy, env=env, optimizer=optimizer, config=config
        )
        return _finish(state, train, envs, state.episodes, trajectory, losses)

    return step


STEPS: dict[str, Callable[..., Step]] = {
    "ppo": make_ppo_step,
    "grpo": make_grpo_step,
    "apg": make_apg_step,
    "shac": make_shac_step,
}
"""By the algorithm's name. A registered algorithm of your own has ``Config`` and ``make_step`` of the same form."""


UPDATES: dict[str, Callable[..., tuple[TrainState, Metrics]]] = {"ppo": ppo_update, "grpo": grpo_update}
"""The algorithms that learn from rollouts, wherever those were made. A registered algorithm of your own that can has
``update`` of the same form."""


def make_learn(
    policy: Policy, optimizer: optax.GradientTransformation, config: Any, update: Callable[..., Any]
) -> Learn:
    """An update from a rollout that was made outside the program; ``state.envs`` is left as it is."""
    restarts = getattr(config, "reset_every_rollout", False)

    def learn(state: RunState, rollout: Rollout, key: Key) -> tuple[RunState, Metrics]:
        train, losses = update(state.train, rollout, key, policy=policy, optimizer=optimizer, config=config)
        episodes = drop_current_episodes(state.episodes) if restarts else state.episodes
        return _finish(state, train, state.envs, episodes, _seen(rollout), losses, rollout.extras.get("valid"))

    return learn


def _seen(rollout: Rollout) -> Trajectory:
    return Trajectory(
        obs=rollout.obs,
        reward=rollout.reward,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        info=rollout.extras["info"],
    )


def _finish(
    state: RunState,
    train: TrainState,
    envs: PyTree,
    episodes: EpisodeStats,
    seen: Trajectory,
    losses: Metrics,
    valid: Array | None = None,
) -> tuple[RunState, Metrics]:
    """The new run state, and all metrics of the step under their tags."""
    success = seen.info.get("success", jnp.full(seen.reward.shape, jnp.nan))
    episodes = track_episodes(episodes, seen.reward, seen.done, success, valid)
    metrics = {f"train/{name}": value for name, value in losses.items()}
    metrics |= episode_metrics(episodes) | step_metrics(seen.info, valid)
    return RunState(update=state.update + 1, train=train, envs=envs, episodes=episodes), metrics


def step_metrics(info: dict[str, Any], valid: Array | None = None) -> Metrics:
    """Means over the rollout of what the env reports at each step: ``rewards/<term>`` and ``metrics/<name>``.

    Args:
        valid: [T, N] bool, the steps that count. None: all.
    """
    return {
        f"{group}/{name}": x.mean(where=valid)
        for group in ("rewards", "metrics")
        for name, x in info.get(group, {}).items()
        if x.ndim == 2  # [T, N]: one number for each env
    }


def repeat_step(step: Step, max_repeats: int, *, out_shardings: Any = None) -> Any:
    """Jitted ``(state, seed key, n) -> (state, metrics)``: n ≤ max_repeats steps in one dispatch, n a traced number.

    One program serves every n, so that a run's numbers do not depend on where its dispatches were cut. Step number k
    draws from ``fold_in(seed key, k)``: nothing random is stored.

    Args:
        out_shardings: of state and metrics, where several devices share the work.

    Returns:
        Metrics are [max_repeats], of which the first n are set.
    """

    def repeated(state: RunState, key: Key, num_repeats: Array) -> tuple[RunState, Metrics]:
        def body(i: Array, carry: tuple[RunState, Metrics]) -> tuple[RunState, Metrics]:
            state, log = carry
            state, metrics = step(state, jax.random.fold_in(key, state.update))
            return state, {name: log[name].at[i].set(value) for name, value in metrics.items()}

        shapes = jax.eval_shape(step, state, key)[1]
        log = {name: jnp.full((max_repeats, *x.shape), jnp.nan, x.dtype) for name, x in shapes.items()}
        return jax.lax.fori_loop(0, num_repeats, body, (state, log))

    return jax.jit(repeated, out_shardings=out_shardings)
