"""FlashSAC: soft actor-critic with a distributional critic, batch statistics and weights of a fixed length.

    critic k: pₖ(s, a), a distribution over atoms z; Qₖ = Σ z·pₖ
    L(Q) = −E[Σ Π(r/c + discount·(z − α·log π(a'|s')); p'ₘ(s', a'))·log pₖ(s, a)],  a' ~ π, m = argminₖ Q'ₖ(s', a')
    L(π) = E[α·log π(a|s) − minₖ Qₖ(s, a)],  L(α) = α·E[−log π(a|s) − H̄]

Π projects onto the atoms; c = max(√Var R, max |R| / ``value_range``), R the discounted returns so far. The actor steps
first, normalized over [s; s'], and with α; then both critics, theirs and the target's normalized over [(s, a);
(s', a')]. The actor's Q, and the policy that acts, are normalized by running statistics.

Source: FlashSAC (github.com/Holiday-Robot/FlashSAC), whose R continues for one reward after an episode's end; joint
batches: Bhatt et al. 2024, CrossQ. The learning rate falls with updates, not with gradient steps.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.core import FrozenDict
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from ejax.algorithms.demonstrations import fill_demonstrations
from ejax.algorithms.off_policy import OFF_POLICY_FIELDS, OffPolicyOptions, OffPolicyState, off_policy_update
from ejax.algorithms.record import Algorithm
from ejax.algorithms.replay_buffer import Transition
from ejax.algorithms.soft_actor import learned_alpha, sample_soft, step_networks, with_skipped_fraction
from ejax.numerics.reward_scale import RewardScale, deviation, init_reward_scale, track_returns
from ejax.numerics.value_bins import bin_values, expected_value, project_support
from ejax.optim import ScheduleConfig, follow_critic
from ejax.policies.flash import FlashQ, unit_length
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Metrics, Params, Policy, PyTree, Rollout, TrainState, split_critic, with_networks


class FlashSACConfig(OffPolicyOptions):
    """``algorithm.cfg`` of ``flash_sac``. Defaults: FlashSAC's for one environment, but for ``gradient_steps``."""

    batch_size: PositiveInt = 512
    """Transitions of a minibatch, on all devices together."""
    gradient_steps: PositiveInt = 2
    """Gradient steps of an update, which follows ``buffer_size`` · ``num_envs`` environment steps."""
    learning_starts: NonNegativeInt = 10_000
    """Transitions in the buffer before the first gradient step; until then actions are uniform."""
    policy_delay: PositiveInt = 2
    """The actor steps with every so many steps of the critics; divides ``gradient_steps``."""
    tau: PositiveFloat = 0.01
    """τ in Q' ← (1 − τ)·Q' + τ·Q, after each gradient step."""
    lr_scheduler: ScheduleConfig = ScheduleConfig(name="cosine", kwargs=FrozenDict(eta_min=1.5e-4))
    """The change of the learning rate from update to update."""
    target_std: PositiveFloat = 0.15
    """σ in the entropy's target H̄ = ½·A·log(2πe·σ²), of actions in [-1, 1]."""

    def init_extra(self, num_envs: int) -> "ReturnScale":
        return ReturnScale(returns=init_reward_scale(num_envs), largest=jnp.zeros(()))


@struct.dataclass(kw_only=True)
class ReturnScale:
    """``OffPolicyState.extra``: what rewards are divided by."""

    returns: RewardScale
    largest: Array
    """max |R| so far, []."""

    def divisor(self, value_range: float) -> Array:
        return jnp.maximum(deviation(self.returns), self.largest / value_range)


@partial(jax.jit, static_argnames=("policy", "optimizer", "config"))
def flash_sac_update(
    state: tuple[TrainState, OffPolicyState],
    rollout: Rollout,
    key: Key,
    *,
    policy: Any,
    optimizer: optax.GradientTransformation,
    config: FlashSACConfig,
) -> tuple[tuple[TrainState, OffPolicyState], Metrics]:
    """Add a rollout to the buffer and make ``gradient_steps`` steps of FlashSAC; see ``off_policy_update``."""
    given: Any = {"policy": policy, "optimizer": optimizer, "config": config}
    return off_policy_update(state, rollout, key, learn=flash_sac_step, see=track_scale, **given)


def track_scale(scale: ReturnScale, rollout: Rollout, config: FlashSACConfig) -> ReturnScale:
    """Add the discounted returns of a rollout."""
    steps = (rollout.reward, rollout.done, rollout.valid)
    returns, discounted = track_returns(scale.returns, *steps, gamma=config.gamma)
    counts = jnp.isfinite(discounted) if rollout.valid is None else jnp.isfinite(discounted) & rollout.valid
    return ReturnScale(returns=returns, largest=jnp.abs(discounted).max(initial=scale.largest, where=counts))


def flash_sac_step(
    state: TrainState,
    extra: ReturnScale,
    batch: Transition,
    key: Key,
    moves_actor: bool,
    *,
    policy: FlashQ,
    optimizer: optax.GradientTransformation,
    config: FlashSACConfig,
) -> tuple[TrainState, ReturnScale, Metrics]:
    """Make one gradient step of the actor and α (``moves_actor``), then one of the critics, and move the target."""
    key_actor, key_target = jax.random.split(key)
    divisor = extra.divisor(policy.value_range)
    batch = replace(batch, reward=batch.reward / divisor)
    actor, critic = split_critic(state.params["params"])
    entropy_target = 0.5 * policy.action_spec.num_actions * math.log(2.0 * math.pi * math.e * config.target_std**2)
    step = partial(_step, policy=policy, optimizer=optimizer, config=config)

    def actor_loss(actor: PyTree) -> tuple[Array, Any]:
        both = jax.tree.map(lambda *x: jnp.concatenate(x), batch.obs, batch.next_obs)
        params = with_networks(state.params, actor)
        (joint, _), moved = policy.apply(params, both, observe=True, mutable=["batch_stats"])
        distribution = jax.tree.map(lambda x: jnp.split(x, 2)[0], joint)
        action, log_prob = sample_soft(distribution, key_actor)
        # the critics are held, though the gradient goes through them to the action
        output: Any = policy.apply(state.params, batch.obs, action, method="action_values")
        q = mean_value(policy, output).min(axis=0)
        alpha, entropy = learned_alpha(state.params), -log_prob.mean()
        of_alpha = jnp.exp(actor["log_alpha"]) * jax.lax.stop_gradient(entropy - entropy_target)
        total = jnp.mean(alpha * log_prob - q) + of_alpha
        return total, {"entropy": entropy, "alpha": alpha, "moved": moved}

    metrics: Metrics = {}
    if moves_actor:
        state, metrics = step(state, actor, actor_loss, name="actor")
    action, target = soft_target(state, batch, key_target, policy=policy)

    def critic_loss(critic: PyTree) -> tuple[Array, Any]:
        output, moved = _joint_values(policy, with_networks(state.params, critic), batch, action)
        of_batch = jnp.split(output, 2, axis=1)[0]
        if policy.num_bins is None:
            losses = jnp.square(of_batch - target[None])
        else:
            losses = -jnp.sum(target[None] * jax.nn.log_softmax(of_batch), axis=-1)
        return losses.mean(), {"q": mean_value(policy, of_batch).mean(), "moved": moved}

    state, of_critic = step(state, critic, critic_loss, name="critic")
    exploration = {**state.params["exploration"], "uniform": jnp.zeros((), bool)}
    params = {**state.params, "exploration": exploration}
    state = replace(state, params=params, target=follow_critic(state.target, params, config.tau))
    return state, extra, with_skipped_fraction({**metrics, **of_critic, "reward_divisor": divisor})


def soft_target(state: TrainState, batch: Transition, key: Key, *, policy: FlashQ) -> tuple[Array, Array]:
    """Compute ``(a', the critics' target)``: probabilities of atoms [B, bins], or values [B] without atoms."""
    distribution, _ = policy.apply(state.params, batch.next_obs)
    action, log_prob = sample_soft(distribution, key)
    entropy_cost = learned_alpha(state.params) * log_prob
    output, _ = _joint_values(policy, state.target, batch, action)
    of_next = jnp.split(output, 2, axis=1)[1]
    value = mean_value(policy, of_next)
    if policy.num_bins is None:
        return action, batch.reward + batch.discount * (value.min(axis=0) - entropy_cost)
    logits = jnp.take_along_axis(of_next, value.argmin(axis=0)[None, :, None], axis=0)[0]
    atoms = bin_values(*_limits(policy), policy.num_bins)
    support = batch.reward[:, None] + batch.discount[:, None] * (atoms[None] - entropy_cost[:, None])
    return action, project_support(jax.nn.softmax(logits), support, *_limits(policy))


def mean_value(policy: FlashQ, output: Array) -> Array:
    """Compute the critics' values [critics, ...] of their outputs."""
    return output if policy.num_bins is None else expected_value(output, *_limits(policy))


def _step(
    state: TrainState, trained: PyTree, loss: Any, policy: FlashQ, optimizer: Any, config: FlashSACConfig, name: str
) -> tuple[TrainState, Metrics]:
    """Step some networks, with their running statistics, and restore the norm of their weights."""
    before = state.params["batch_stats"]
    state, metrics = step_networks(state, trained, loss, optimizer, config, name)
    moved, skips = metrics.pop("moved")["batch_stats"], metrics[f"skipped_{name}"] & config.skip_nonfinite_updates
    stats = jax.tree.map(lambda old, new: jnp.where(skips, old, new), before, moved)
    stepped = {each: state.params["params"][each] for each in trained}
    params = with_networks(state.params, unit_length(stepped) if policy.unit_rows else stepped)
    return replace(state, params={**params, "batch_stats": stats}), metrics


def _joint_values(policy: FlashQ, params: Params, batch: Transition, action: Array) -> tuple[Array, PyTree]:
    """Evaluate [(s, a); (s', a')], normalized by their own statistics: [critics, 2·B, ...], and the running ones."""
    obs = jax.tree.map(lambda *x: jnp.concatenate(x), batch.obs, batch.next_obs)
    actions = jnp.concatenate([batch.action, action])
    given: Any = {"observe": True, "mutable": ["batch_stats"], "method": "action_values"}
    return policy.apply(params, obs, actions, **given)


def _limits(policy: FlashQ) -> tuple[float, float]:
    return -policy.value_range, policy.value_range


def _add_demonstrations(options: FlashSACConfig, own: OffPolicyState, rollout: Rollout) -> OffPolicyState:
    """Fill them in; the rewards' scale is theirs too, or their returns would lie beyond the atoms."""
    # a fork already has returns
    alone = replace(own.extra, returns=replace(own.extra.returns, discounted=jnp.zeros(1)))
    scale = jax.jit(track_scale, static_argnames="config")(alone, rollout, config=options)
    returns = replace(own.extra.returns, moments=scale.returns.moments)
    return replace(fill_demonstrations(options, own, rollout), extra=replace(scale, returns=returns))


def _policy_problems(options: FlashSACConfig, policy: Policy) -> Iterator[Problem]:
    del options
    if not isinstance(policy, FlashQ):
        text = f"got {type(policy).__name__}, without batch statistics over atoms; set policy.name to flash_q"
        yield Problem("policy.name", text)


ALGORITHM = Algorithm(
    Config=FlashSACConfig,
    update=flash_sac_update,
    **OFF_POLICY_FIELDS | {"add_demonstrations": _add_demonstrations, "policy_problems": _policy_problems},
)
