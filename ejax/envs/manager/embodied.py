"""The manager environment: a task that is written in an EmbodiChain gym config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.manager.plan import SOURCE, Plan, make_plan, stored_keys
from ejax.envs.manager.scene import marker_name
from ejax.envs.manager.specs import Spec
from ejax.envs.manager.world import World, WorldState, initial_state
from ejax.envs.mujoco.engine import Engine, Physics, render
from ejax.finite import all_finite
from ejax.frozen import freeze
from ejax.problems import KeyReport
from ejax.types import Array, CameraView, Key, Timestep

Obs = dict[str, Any]


@dataclass(frozen=True)
class EmbodiedEnv:
    """
        r = task's reward + Σ weight·term        (a ``replace`` term: r = weight·term so far)

    One step: action terms set the drives' targets → physics → interval events → observation → success, failure, metrics
    → reward. The observation is nested: ``robot/qpos``, ``robot/qvel``, ``robot/qf``, and what ``observations`` add or
    modify; its leaves are vectors. ``info["rewards"]`` holds the terms without their weights.

    ``interval_step`` counts the control steps of an episode: one that ended does not shift the events of the next.

    Differs from EmbodiChain: nothing resets itself here, and no event of one environment reaches another. ``startup``
    events draw the same for all environments, before those of ``reset``.

    Args:
        gym_config: as ``json.load`` gives it.
        physics: the engine, see ``ejax.envs.mujoco.engine``.
        interval_events: more events of mode interval, in the form of ``env.events`` and after them: how a run's
            training and evaluation come to differ.

    Raises:
        ConfigError: keys that cannot be had, with the reason.
    """

    gym_config: Mapping[str, Any]
    physics: Engine = "auto"
    interval_events: Mapping[str, Any] = FrozenDict()

    def __post_init__(self) -> None:
        for name in ("gym_config", "interval_events"):
            object.__setattr__(self, name, freeze(dict(getattr(self, name))))
        Physics("", self.physics)  # rejects a wrong engine here, not in a later trace
        _try_functors(self)

    @property
    def plan(self) -> Plan:
        return make_plan(self.gym_config, self.interval_events)

    @property
    def max_episode_steps(self) -> int:
        """0: no limit."""
        return max(0, self.plan.max_episode_steps)

    @property
    def control_period(self) -> float:
        return self.plan.timestep * self.plan.num_substeps

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        return _as_space(jax.eval_shape(self.reset, jax.random.key(0))[1])

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        low = np.concatenate([term.low for term in self.plan.terms]).astype(np.float32)
        high = np.concatenate([term.high for term in self.plan.terms]).astype(np.float32)
        return gymnasium.spaces.Box(low, high, low.shape, np.float32)

    def reset(self, key: Key) -> tuple[WorldState, Obs]:
        plan = self.plan
        state = self._start()
        for mode, key_mode in (("startup", jax.random.key(0)), ("reset", key)):
            for i, event in enumerate(plan.events):
                if event.mode == mode:
                    state = event(self._world(state), jax.random.fold_in(key_mode, i))
        return state, self._observe(self._world(state))

    def step(self, state: WorldState, action: Array, key: Key) -> tuple[WorldState, Timestep]:
        plan = self.plan
        before = self._world(state)
        width = len(state.action)
        if action.shape != (width,):
            raise ValueError(f"EmbodiedEnv.step takes an action of shape ({width},), got {action.shape}")
        start = 0
        for term in plan.terms:
            state = term.apply(self._world(state), action[start : start + term.width])
            start += term.width
        state = self._world(state).advance(plan.num_substeps)
        state = replace(state, action=action, episode_step=state.episode_step + 1)
        for i, event in enumerate(plan.events):
            if event.mode == "interval":
                fired = event(self._world(state), jax.random.fold_in(key, i))
                due = state.episode_step % event.interval_step == 0
                state = jax.tree.map(lambda new, old, due=due: jnp.where(due, new, old), fired, state)

        world = replace(self._world(state), before=before)
        obs = self._observe(world)
        judgement = plan.judge(world)
        finite = all_finite(state)
        success = judgement.success & finite
        info: dict[str, Any] = {"success": success, "fail": judgement.fail}
        terms = {reward.name: reward(world, obs, action, info).astype(jnp.float32) for reward in plan.rewards}
        total = judgement.reward
        for reward in plan.rewards:
            weighted = reward.weight * terms[reward.name]
            total = weighted if reward.mode == "replace" else total + weighted
        out_of_time = (plan.max_episode_steps > 0) & (state.episode_step >= plan.max_episode_steps)
        return state, Timestep(
            obs=obs,
            reward=total,
            terminated=jnp.zeros((), bool) if plan.ignore_terminations else success | judgement.fail,
            truncated=judgement.truncated | out_of_time | ~finite,
            info={**info, "elapsed_steps": state.episode_step, "metrics": judgement.metrics, "rewards": terms},
        )

    def render(
        self, state: WorldState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        targets: dict[str, Array | NDArray[Any]] = {marker_name(key): pose[:3, 3] for key, pose in state.poses.items()}
        return render(
            self.plan.scene.xml, state.physics.qpos, width=width, height=height, mocap_pos=targets, camera=camera
        )

    def _start(self) -> WorldState:
        """Before any event."""
        plan = self.plan
        return replace(
            initial_state(plan.scene),
            action=jnp.zeros(sum(term.width for term in plan.terms)),
            poses={name: jnp.zeros((4, 4)) for event in plan.events for name in stored_keys(event)},
        )

    def _world(self, state: WorldState) -> World:
        plan = self.plan
        return World(plan.scene, state, plan.active, plan.extensions, plan.max_episode_steps, self.physics)

    def _observe(self, world: World) -> Obs:
        obs = _robot(world)
        for each in self.plan.observations:
            obs = _put(obs, each, world)
        return jax.tree.map(lambda leaf: leaf.reshape(-1).astype(jnp.float32), obs)


def _robot(world: World) -> Obs:
    """What is observed of every robot."""
    return {"robot": {"qpos": world.qpos, "qvel": world.qvel, "qf": world.qf}}


def _put(obs: Obs, functor: Spec, world: World) -> Obs:
    """The observation with one functor's value in it.

    Raises:
        ValueError: ``modify`` of what is not there, or ``add`` of what is.
    """
    old = _at(obs, functor.path)
    there, name = ", ".join(_paths(obs)), "/".join(functor.path)
    if functor.mode == "modify":
        if old is None or isinstance(old, Mapping):
            raise ValueError(f"cannot modify observation '{name}'; there is {there}")
        return _with(obs, functor.path, functor(world, old))
    if old is not None:
        raise ValueError(f"cannot add observation '{name}': it is there already ({there}); use mode modify")
    return _with(obs, functor.path, functor(world, obs))


def _at(obs: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        obs = obs.get(name) if isinstance(obs, Mapping) else None
    return obs


def _with(obs: Obs, path: tuple[str, ...], value: Array) -> Obs:
    first, *rest = path
    if not rest:
        return {**obs, first: value}
    return {**obs, first: _with(obs.get(first, {}), tuple(rest), value)}


def _paths(obs: Mapping[str, Any], above: str = "") -> list[str]:
    return [
        path
        for name, value in sorted(obs.items())
        for path in (_paths(value, f"{above}{name}/") if isinstance(value, Mapping) else [above + name])
    ]


def _as_space(obs: Any) -> Any:
    if isinstance(obs, Mapping):
        return gymnasium.spaces.Dict({name: _as_space(value) for name, value in obs.items()})
    return gymnasium.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)


def _try_functors(env: EmbodiedEnv) -> None:
    """Trace each functor once, so that what it refuses is told with its key.

    Raises:
        ConfigError: what they refuse, all of it.
    """
    plan = env.plan
    report = KeyReport({note.key: note for note in plan.notes})

    def attempt(key: str, call: Callable[..., Any], *shapes: Any) -> Any:
        try:
            return jax.eval_shape(call, *shapes)
        except (TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
            report.refuse(key, str(error).splitlines()[0])
            return None

    def world(state: WorldState) -> World:
        return replace(env._world(state), engine="mujoco", before=env._world(state))

    state, key = jax.eval_shape(lambda: (env._start(), jax.random.key(0)))
    for event in plan.events:
        attempt(event.key, lambda state, key, event=event: event(world(state), key), state, key)
    obs: Obs = jax.eval_shape(lambda state: _robot(world(state)), state)
    for each in plan.observations:
        shapes = attempt(each.key, lambda obs, state, each=each: _put(obs, each, world(state)), obs, state)
        obs = obs if shapes is None else shapes
    outcome = attempt("id", lambda state: vars(plan.judge(world(state))), state)
    info = {name: outcome[name] for name in ("success", "fail")} if outcome else {}
    for reward in plan.rewards:

        def value(obs: Obs, state: WorldState, info: Any, reward: Spec = reward) -> Array:
            return reward(world(state), obs, state.action, info)

        attempt(reward.key, value, obs, state, info)
    report.raise_if_refused(SOURCE)
