"""Golden steps of PointMassRL, and APG's gradients and updates through it, beside ejax's."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import optax
from flax import struct
from golden_pairs import KEY, Pair, cases, load, state_dict_pairs, train_state, under

from ejax.algorithms.apg import apg_update
from ejax.config import parse_config
from ejax.distributions import Normal
from ejax.envs.tasks.point_mass import PointMassRL, PointMassState
from ejax.optim import make_optimizer
from ejax.rollout import EnvCarry
from ejax.training.policies import make_policy
from ejax.types import Array, Distribution, Key, Params, Policy, PyTree, Timestep

APG = "embodichain_0_3_apg.npz"
FIELDS = list(PointMassState.__dataclass_fields__)


def steps() -> Iterator[Pair]:
    """Four steps of 64 environments. States only where the episode goes on: the others were reset by chance."""
    golden = load("head_point_mass_steps.npz")
    env = PointMassRL(max_episode_steps=int(golden["max_episode_steps"]), success_bonus=float(golden["success_bonus"]))
    step = jax.jit(jax.vmap(lambda state, action: env.step(state, action, KEY)))
    for t in range(4):
        recorded = under(golden, f"t{t}/")
        state, timestep = step(_state(under(recorded, "pre/")), jnp.asarray(recorded["action"]))
        yield Pair("rewards", f"t{t} reward", timestep.reward, recorded["reward"])
        for name in ("terminated", "truncated"):
            yield Pair("ends", f"t{t} {name}", getattr(timestep, name), recorded[name])
        yield Pair("ends", f"t{t} success", timestep.info["success"], recorded["success"])
        for name, x in under(recorded, "metrics/").items():
            yield Pair("metrics", f"t{t} {name}", timestep.info["metrics"][name], x)
        running = ~(recorded["terminated"] | recorded["truncated"])
        for name in FIELDS:
            yield Pair("states", f"t{t} {name}", getattr(state, name)[running], recorded[f"post/{name}"][running])
        yield Pair("states", f"t{t} obs", timestep.obs[running], recorded["obs"][running])


def apg(case: str) -> Iterator[Pair]:
    """Return the gradient that the optimizer is given, and one update."""
    golden, spec = load(APG), cases(APG)[case]
    actor = {"type": "mlp", "network_cfg": json.loads(str(golden["network"]))}
    num_envs = len(golden["start/position"])
    config = parse_config(
        {
            "trainer": {"learning_env": "PointMassRL", "num_envs": num_envs, **spec["trainer"]},
            "policy": {"name": "actor_only", "actor": actor},
            "algorithm": {"name": "apg", "cfg": spec["cfg"]},
            "compat": "embodichain-0.3",
        }
    )
    options: Any = config.algorithm.cfg
    env = Restarting(PointMassRL(max_episode_steps=golden["noise"].shape[1]), golden)
    inner = make_policy(config.policy, env.task)
    recorded = under(golden, f"{case}/")
    optimizer = optax.chain(_KEEP, make_optimizer(options.optimizer))
    start, policy = env.start(), GivenNoise(inner)
    state = train_state(inner, start.obs["obs"], under(golden, "init/"), optimizer)
    state, _, metrics = apg_update(state, start, KEY, policy=policy, env=env, optimizer=optimizer, config=options)
    gradient = {"params": state.opt_state[0]}
    for pair in state_dict_pairs("gradient", inner, gradient, under(recorded, "gradient/")):
        yield pair._replace(atol=1e-6)
    yield from state_dict_pairs("parameters", inner, state.params, under(recorded, "final/"))
    for name, x in under(recorded, "metric/").items():
        yield Pair("metrics", name, metrics[name], x)


_KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
)
"""Changes nothing; its state is the gradient."""


@dataclass(frozen=True, eq=False)
class Restarting:
    """PointMassRL as it was recorded: each new episode starts alike, and the noise of its actions is given.

    The observation is ``{"obs", "noise"}``, the state ``(PointMassState, row of the noise)``.
    """

    task: PointMassRL
    golden: Any

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        return self.task.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return self.task.action_space

    @property
    def max_episode_steps(self) -> int:
        return self.task.max_episode_steps

    def start(self) -> EnvCarry:
        """Return the recorded first states of all environments."""
        state = (_state(under(self.golden, "start/")), jnp.arange(len(self.golden["start/position"])))
        return EnvCarry(state=state, obs=jax.vmap(self._observe)(*state))

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        del key
        state = (_state(under(self.golden, "restart/")), jnp.asarray(len(self.golden["noise"]) - 1))
        return state, self._observe(*state)

    def step(self, state: PyTree, action: Array, key: Key) -> tuple[PyTree, Timestep]:
        inner, row = state
        inner, timestep = self.task.step(inner, action, key)
        return (inner, row), replace(timestep, obs=self._observe(inner, row))

    def _observe(self, state: PointMassState, row: Array) -> PyTree:
        noise = jnp.asarray(self.golden["noise"])[row, state.episode_step]
        return {"obs": self.task.observe(self.task.world(state)), "noise": noise}


@dataclass(frozen=True)
class GivenNoise:
    """A policy whose samples take their noise from the observation."""

    policy: Policy

    def init(self, key: Key, obs: PyTree) -> Params:
        return self.policy.init(key, obs["obs"])

    def apply(self, params: Params, obs: PyTree) -> tuple[Any, Array]:
        distribution, value = self.policy.apply(params, obs["obs"])
        return GivenNormal(distribution, obs["noise"]), value


@struct.dataclass
class GivenNormal(Distribution):
    normal: Normal
    noise: Array

    def sample(self, key: Key) -> Array:
        del key
        return self.normal.mean + jnp.exp(self.normal.log_std) * self.noise

    def mode(self) -> Array:
        return self.normal.mode()

    def entropy(self) -> Array:
        return self.normal.entropy()


def _state(arrays: dict[str, Any]) -> PointMassState:
    return PointMassState(**{name: jnp.asarray(arrays[name]) for name in FIELDS})
