"""Steps that a gradient flows back through, from rewards over dynamics to actions: what APG and SHAC share."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, NonNegativeFloat

from ejax.algorithms.options import GradientOptions
from ejax.algorithms.record import MakeStep
from ejax.algorithms.step import RunState, Step, finish
from ejax.envs.actions import action_form, to_action
from ejax.numerics.episodes import drop_current_episodes
from ejax.numerics.platforms import by_platform, unrolled_scan
from ejax.rollout import EnvCarry, starts_of, step
from ejax.schema.messages import explain
from ejax.schema.problems import ConfigError, Problem
from ejax.types import Array, Env, HostEnv, Key, Metrics, Params, Policy, Timestep, TrainState


class DifferentiableOptions(GradientOptions):
    """The choice of actions and the value of their rewards: options of APG and SHAC."""

    deterministic_actions: bool = False
    """Act by the distribution's mode instead of a sample."""
    clip_actions_to_space: bool = False
    """Clip actions to the action space's bounds before the environment sees them; no gradient passes where they
    were clipped."""
    action_adjoint_max_norm: NonNegativeFloat = 0.0
    """Clip the gradient that arrives at each environment's action to this norm, at each step; a non-finite one becomes
    zero. 0: off."""
    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of a step."""
    ent_coef: NonNegativeFloat = 0.0
    """Weight of the entropy, which is to be large."""


class Dynamics(NamedTuple):
    """Dynamics of N rows in place of an environment's, such as a learned model's."""

    step: Callable[[EnvCarry, Array], tuple[EnvCarry, Timestep]]
    """``(rows, action [N, A]) -> (rows after it, time step)``, as ``ejax.rollout.step``: it starts ended rows again."""
    action_space: Any = None
    """None: actions are as the policy gives them."""
    values: tuple[Array, Array] | None = None
    """The lowest and the highest value that a state can have; a critic's estimate is clipped to them. None: unknown."""


def differentiable_problems(options: Any, env: Env | HostEnv) -> Iterator[Problem]:
    """Report an environment that the gradient cannot pass through, found by tracing that of one reward."""
    del options
    if isinstance(env, HostEnv):
        return  # refused for a simpler reason: the algorithm needs its environment inside the program
    space: Any = env.action_space

    def reward(action: Array, key: Key) -> Array:
        return env.step(env.reset(key)[0], action, key)[1].reward

    action, key = jax.ShapeDtypeStruct(space.shape, jnp.float32), jax.eval_shape(jax.random.key, 0)
    try:
        jax.eval_shape(jax.grad(reward), action, key)
    except (TypeError, ValueError) as error:
        text = f"the environment cannot be differentiated ({explain(error).splitlines()[0]})"
        text = f"{text}; PointMassRL and PlanarReachRL can be, others train with ppo, grpo or model_shac"
        yield Problem("algorithm.name", text)


def without_trajectory(update: Callable[..., Any]) -> Callable[..., tuple[TrainState, EnvCarry, Metrics]]:
    """Jit the update without its last result, the steps that it learned from."""

    @partial(jax.jit, static_argnames=("policy", "env", "optimizer", "config"))
    @wraps(update)
    def update_only(*args: Any, **kwargs: Any) -> tuple[TrainState, EnvCarry, Metrics]:
        return update(*args, **kwargs)[:3]

    return update_only


def step_maker(update: Callable[..., Any], *, starts_afresh: Callable[[Any], bool] = lambda options: False) -> MakeStep:
    """Make ``Algorithm.make_step`` of an update. ``starts_afresh``: each update begins with new episodes."""

    def make_step(
        policy: Policy, env: Env, optimizer: optax.GradientTransformation, config: Any, *, num_steps: int, dropout: bool
    ) -> Step:
        del num_steps  # the options have the horizon
        if dropout:
            text = "got a policy with dropout, which this algorithm does not support; leave it out, or use ppo or grpo"
            raise ConfigError([Problem("algorithm.name", text)])

        def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
            train, envs, losses, trajectory = update(
                state.train, state.envs, key, policy=policy, env=env, optimizer=optimizer, config=config
            )
            episodes = drop_current_episodes(state.episodes) if starts_afresh(config) else state.episodes
            return finish(replace(state, train=train, envs=envs, episodes=episodes), trajectory, losses)

        return step

    return make_step


def play(
    params: Params,
    taps: Array,
    carry: EnvCarry,
    key: Key,
    *,
    policy: Policy,
    env: Env | Dynamics,
    options: DifferentiableOptions,
) -> tuple[EnvCarry, Timestep, Array]:
    """Make T steps with reparameterized actions; the gradient flows through actions, dynamics and rewards, and that of
    ``taps``, zeros [T, 4], is ``adjoint_metrics``' input.

    Returns:
        The environments after it; the trajectory, leaves [T, N, ...], with ``obs`` as acted on; and the entropy of each
        action's distribution, [T, N].
    """

    form = action_form(env.action_space)
    clipped = action_form(env.action_space, clips=True)._replace(action_shape=None)

    def one_step(carry: EnvCarry, xs: tuple[Key, Array, EnvCarry | None]) -> tuple[EnvCarry, tuple[Timestep, Array]]:
        key, tap, start = xs
        key_action, key_env = jax.random.split(key)
        distribution, _ = policy.apply(params, carry.obs)
        deterministic = options.deterministic_actions
        action = distribution.mode() if deterministic else distribution.env_action(distribution.sample(key_action))
        if options.clip_actions_to_space:
            action = to_action(clipped, action, jnp)
        # last, so that what the limit sees is the gradient that comes from the environment alone
        if options.action_adjoint_max_norm > 0.0:
            action = clip_adjoint(action, tap, options.action_adjoint_max_norm)
        action = to_action(form, action, jnp)
        if isinstance(env, Dynamics):
            after, timestep = env.step(carry, action)
        else:
            after, timestep = step(env, carry, action, key_env, start)
        return after, (replace(timestep, obs=carry.obs), distribution.entropy())

    def all_steps(carry: EnvCarry, keys: Key, taps: Array, starts: EnvCarry | None = None) -> Any:
        with jax.named_scope("env_steps"):
            return jax.lax.scan(one_step, carry, (keys, taps, starts))

    def with_starts(carry: EnvCarry, keys: Key, taps: Array) -> Any:
        # new episodes are drawn for all steps beforehand, as in ejax.rollout
        num_envs = jax.tree.leaves(carry.obs)[0].shape[0]
        starts = starts_of(cast(Env, env), jax.vmap(lambda key: jax.random.split(key)[1])(keys), num_envs)
        return all_steps(carry, keys, taps, starts)

    both = all_steps if isinstance(env, Dynamics) else by_platform(cpu=all_steps, gpu=with_starts)
    carry, (trajectory, entropy) = both(carry, jax.random.split(key, taps.shape[0]), taps)
    return carry, trajectory, entropy


def discounted_sum(x: Array, done: Array, discount: Array, *, gamma: float) -> tuple[Array, Array]:
    """Compute Σₜ dₜ·xₜ with d₀ = ``discount``, dₜ₊₁ = 1 after a done, else γ·dₜ, and the discount after it, [N] each;
    ``x`` and ``done`` are [T, N]."""

    def add(carry: tuple[Array, Array], step: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        total, discount = carry
        x_t, done_t = step
        return (total + discount * x_t, jnp.where(done_t, 1.0, gamma * discount)), None

    return unrolled_scan(add, (jnp.zeros_like(discount), discount), (x, done))[0]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def clip_adjoint(action: Array, tap: Array, max_norm: float) -> Array:
    """Return ``action``; its gradient is clipped row by row, a non-finite row becomes zero. The "gradient" of ``tap``
    [4] carries statistics of that out."""
    del tap, max_norm
    return action


def _clip_adjoint_backward(max_norm: float, residual: None, grad: Array) -> tuple[Array, Array]:
    del residual
    finite = jnp.isfinite(grad).all(axis=-1, keepdims=True)
    safe = jnp.where(finite, grad, 0.0)
    largest = jnp.maximum(jnp.abs(safe).max(axis=-1, keepdims=True), 1e-30)
    norm = largest * jnp.linalg.norm(safe / largest, axis=-1, keepdims=True)  # squares do not overflow
    clipped = jnp.where(norm > max_norm, safe * (max_norm / jnp.maximum(norm, 1e-30)), safe)
    stats = jnp.stack([norm.sum(), norm.max(), (norm > max_norm).sum(), (~finite).sum()])
    return clipped, stats.astype(grad.dtype)


clip_adjoint.defvjp(lambda action, tap, max_norm: (action, None), _clip_adjoint_backward)


def adjoint_metrics(tapped: Array, num_envs: int, max_norm: float) -> Metrics:
    """Compute EmbodiChain's four numbers; none where ``max_norm`` is 0. ``tapped``: [..., 4], one row per step."""
    if max_norm == 0.0:
        return {}
    rows = tapped.reshape(-1, 4)
    total = rows.shape[0] * num_envs
    finite = jnp.maximum(total - rows[:, 3].sum(), 1.0)
    return {
        "action_adjoint_preclip_mean_norm": rows[:, 0].sum() / finite,
        "action_adjoint_preclip_max_norm": rows[:, 1].max(),
        "action_adjoint_clipped_fraction": rows[:, 2].sum() / total,
        "action_adjoint_nonfinite_fraction": rows[:, 3].sum() / total,
    }
