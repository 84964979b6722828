"""The evaluation of a policy's chunks as a robot executes them that does not wait: each method under each latency."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax.core import FrozenDict

from ejax.config import ConfigError, Problem
from ejax.config.models import CHUNK, EnvConfig
from ejax.distributions import Normal
from ejax.envs.mujoco.drawing import asset_of
from ejax.envs.mujoco.models import load_model
from ejax.envs.task.entities import ROBOT, drives_of_joints, joint_dofs
from ejax.envs.wrappers.action_chunk import ActionChunk
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.evaluation import evaluate
from ejax.play.comparison import Facts, estimates
from ejax.play.saved_policy import opened_policy, restore_policy
from ejax.policies.calls import rows_like
from ejax.policies.chunks import Execution, Plan
from ejax.runtime.tree_text import named_leaves
from ejax.training.environments import build_env, sample_obs
from ejax.types import Array, Env, HostEnv, Key, Params, Policy, PolicyWithMemory, PyTree, Timestep, persist


def execute_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    methods: Sequence[str],
    latencies: Sequence[int] = (0,),
    every: int | None = None,
    hold: Sequence[str] | None = None,
    num_episodes: int = 100,
    num_envs: int = 32,
    seed: int | None = None,
    **opened: Any,
) -> Facts:
    """Evaluate a run's policy by single actions from the same starts, by each method under each latency, in control
    steps: ``rows`` as of ``compare_run``, with ``largest_jump``, that of all episodes.

    ``every`` is that of ``Execution``; ``hold`` the action where there is none, ``last`` or ``zero``, for all its
    numbers or one for each. The others are as in ``evaluate_run``, with its errors.

    ValueError: no such method; a chunk too short for a latency; none; a latency without ``hold``. ConfigError: an
    environment outside JAX.
    """
    with opened_policy(run, overrides, **opened) as (_, config, path):
        seed, horizon = config.trainer.eval_seed if seed is None else seed, config.env.action_chunk
        if horizon == 1:
            raise ValueError("--chunks executes chunks, and this policy decides on one action; leave out --chunks")
        env = build_env(config.model_copy(update={"env": without_chunks(config.env)}), phase="eval", num_envs=1)
        if isinstance(env, HostEnv):
            text = f"{config.env.id} is stepped outside JAX, where --chunks does not execute; leave out --chunks"
            raise ConfigError([Problem("env.id", text)])
        policy, params = restore_policy(config, ActionChunk(env, horizon), path)
        if isinstance(policy, PolicyWithMemory):
            raise ValueError(f"--chunks: {config.policy.name} has a memory, of whole chunks; leave out --chunks")
        if "rtc" in methods and not is_flow(policy, params, sample_obs(env, 1)):
            raise ValueError("--chunks rtc guides a flow (head.type: flow), which this policy is not; leave out rtc")
        keeps, rows = _keeps(hold, env.action_space, needed=max(latencies) > 0), list[Facts]()
        # all are checked before the first is played
        for rule in [Execution(method, horizon, each, every, keeps) for each in latencies for method in methods]:
            condition = f"latency {rule.latency}, every {rule.steps}"
            print(f"{rule.method}, {condition} …", file=sys.stderr)
            played = partial(evaluate, ExecutedPolicy(policy, rule, len(keeps)), MeasuredEnv(env, rule), params)
            counts = {"num_envs": num_envs, "num_episodes": num_episodes}
            episodes = jax.device_get(played(jax.random.key(seed), **counts))
            facts = estimates(episodes) | {"largest_jump": float(episodes["metrics/largest_jump"].max())}
            rows.append({"engine": rule.method, "condition": condition, **facts})
    columns = {"largest jump": "largest_jump", "on average": "metrics/largest_jump"}
    columns |= {"peak acceleration": "metrics/peak_acceleration"}
    made = {"checkpoint": str(path), "seed": seed, "episodes": num_episodes, "horizon": horizon, "rows": rows}
    return made | {"head": "method", "columns": columns, "left_out": {}, "differences": [], "tolerance": 0.0}


def without_chunks(env: EnvConfig) -> EnvConfig:
    """Let an environment take single actions."""
    cfg = {name: value for name, value in env.cfg.items() if name != "action_chunk"}
    wrappers = tuple(each for each in env.wrappers if CHUNK not in each)
    return env.model_copy(update={"cfg": FrozenDict(cfg), "wrappers": wrappers})


def _keeps(hold: Sequence[str] | None, space: gymnasium.Space[Any], *, needed: bool) -> tuple[bool, ...]:
    """Return for each number of an action whether a step without one repeats it. ValueError: not one for each."""
    if not isinstance(space, gymnasium.spaces.Box) or not space.is_bounded():
        raise ValueError(f"--chunks measures changes of actions in ranges of their bounds, and they have none: {space}")
    if hold is None and needed:
        text = "--hold zero where actions are changes, last where they are targets, or one for each number"
        raise ValueError(f"a robot waits for its first chunk, and no config states how it holds: pass {text}")
    num_actions = int(np.prod(space.shape))
    given = list(hold or ["zero"]) * (1 if hold and len(hold) > 1 else num_actions)
    if len(given) != num_actions or not {*given} <= {"zero", "last"}:
        text = f"zero or last, once or for each of an action's {num_actions} numbers"
        raise ValueError(f"--hold: got {','.join(given)}; must be {text}")
    return tuple(each == "last" for each in given)


def is_flow(policy: Policy, params: Params, obs: PyTree) -> bool:
    """Return whether a policy's chunks are a flow's, which can go on as a plan does."""
    if isinstance(policy, PolicyWithMemory):
        return False
    return bool(jax.eval_shape(lambda params: policy.apply(params, obs)[0], params).is_flow)


@partial(jax.jit, static_argnames=("policy", "most"))
def continued(policy: Policy, params: Params, obs: PyTree, plan: Array, weight: Array, most: float) -> Array:
    """Choose a flow's chunks [N, H·A] that go on as ``plan`` [N, H, A] by ``weight`` [N, H]; where all are 0, modes."""
    distribution: Any = policy.apply(params, obs)[0]
    # the guidance costs a backward pass in each step of the flow
    guided = partial(distribution.continued, plan, weight, most)
    return jax.lax.cond((weight > 0.0).any(), guided, distribution.mode)


@dataclass(frozen=True)
class ExecutedPolicy:
    """A policy of single actions, of ``num_actions`` numbers: another one's chunks, as ``rule`` executes them. Its
    memory is the plan, and the chunk under way."""

    policy: Policy
    rule: Execution
    num_actions: int

    def init(self, key: Key, obs: PyTree) -> Params:
        return self.policy.init(key, obs)

    def init_memory(self, num_rows: int) -> tuple[Plan, Array]:
        plan = self.rule.first((num_rows,), self.num_actions, jnp)
        return plan, plan.actions

    def apply(self, params: Params, obs: PyTree, memory: tuple[Plan, Array], **keywords: Any) -> Any:
        """Return the action for certain, no value, and the memory."""
        rule, (plan, chunk) = self.rule, memory
        if rule.latency:  # before the next one is asked for, which goes on from it
            plan = rule.accept(plan, chunk, jnp)
        asks = plan.step % rule.period == 0

        def ask() -> Array:
            if rule.method == "rtc":
                weight = jnp.broadcast_to(rule.weights, plan.count.shape) * (plan.count > 0)
                made = continued(self.policy, params, obs, plan.actions, weight, rule.guidance)
            else:
                made = self.policy.apply(params, obs)[0].mode()
            return jnp.where(rows_like(asks, chunk), made.reshape(chunk.shape), chunk)

        chunk = jax.lax.cond(asks.any(), ask, lambda: chunk)
        action, after = rule.act(plan if rule.latency else rule.accept(plan, chunk, jnp), jnp)
        return Normal(action, jnp.full_like(action, -jnp.inf)), jnp.zeros(len(action)), (after, chunk)


class _Measured(NamedTuple):
    env: PyTree
    step: Array
    action: Array
    velocity: Array
    jump: Array
    acceleration: Array


@dataclass(frozen=True)
class MeasuredEnv(EnvWrapper):
    """An environment that measures, over an episode, ``largest_jump``: the largest change of a number of the action at
    a seam of ``rule``, in ranges of its bounds; and, where a robot of MuJoCo's has joints that turn, their
    ``peak_acceleration``: the largest change of a velocity from one control step to the next, rad/s²."""

    env: Env
    rule: Execution

    def inner_state(self, state: PyTree) -> PyTree:
        return state.env

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        state, obs = self.env.reset(key)
        zero, action = jnp.zeros(()), jnp.zeros(self.action_space.shape)
        return _Measured(state, jnp.zeros((), jnp.int32), action, self._velocity(state), zero, zero), obs

    def persist(self, ended: PyTree, started: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        state, obs = persist(self.env, ended.env, started.env, obs)
        return started._replace(env=state), obs

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        inner, timestep = self.env.step(state.env, action, key)
        low, high = self.action_space.low, self.action_space.high
        action, velocity = jnp.clip(action, low, high), self._velocity(inner)
        change = jnp.where(self.rule.is_seam(state.step), jnp.abs(action - state.action) / (high - low), 0.0)
        faster = jnp.abs(velocity - state.velocity) / (self.control_period if velocity.size else 1.0)
        largest = [jnp.max(x, initial=most) for x, most in ((change, state.jump), (faster, state.acceleration))]
        names = ("largest_jump", "peak_acceleration")[: 1 + bool(velocity.size)]
        measured = timestep.info.get("metrics", {}) | dict(zip(names, largest, strict=False))
        after = _Measured(inner, state.step + 1, action, velocity, *largest)
        return after, replace(timestep, info=timestep.info | {"metrics": measured})

    def _velocity(self, state: PyTree) -> Array:
        """Return the velocities of the robot's joints that turn, rad/s; none where there is no robot."""
        qvel = [x for path, x in named_leaves(state).items() if path.endswith("physics.qvel")]
        if len(qvel) != 1 or (asset := asset_of(self.env)) is None or not drives_of_joints(model := load_model(asset)):
            return jnp.zeros(0)
        dofs = joint_dofs(model, {"uid": ROBOT}, None)
        return qvel[0][dofs[model.jnt_type[model.dof_jntid[dofs]] == int(mujoco.mjtJoint.mjJNT_HINGE)]]
