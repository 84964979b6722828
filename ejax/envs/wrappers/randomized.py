"""A task whose physics, sensors and delays differ from row to row and from episode to episode."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct

from ejax.envs.mujoco.drawing import AppearingEnv
from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.randomization.events import RowEvents, read_row_events
from ejax.envs.randomization.physics import keep_written
from ejax.envs.randomization.sensing import Side, first, late, push_newest
from ejax.envs.wrappers.wrapper import EnvWrapper
from ejax.schema.frozen import freeze_fields
from ejax.schema.paths import leaves
from ejax.types import Array, Key, PyTree, Timestep, persist

LEVEL = "curriculum_level"
_DRAWS = 0x5EED  # folded into an episode's key: the draws here are apart from the task's own
_SEEN = 0x5EE  # folded into the key of an episode's draws: the noise of its first observation


@struct.dataclass(kw_only=True)
class RandomizedState:
    """One episode."""

    env: PyTree  # the task's state; the row's parameters are in its ``physics``
    drawn: dict[str, PyTree]  # event -> its bias or latency
    actions: PyTree  # the policy's last actions [·, A], newest first; () without an event that looks at them
    observations: PyTree  # the task's last observations, leaves [·, ...], newest first; () without one
    seed: Array  # [2] uint32: the key of this episode's draws
    level: PyTree  # the curriculum's level, float32; () without one
    num_steps: Array  # control steps of the row, over all its episodes, int32
    episode_step: Array  # control steps of the episode, int32


@dataclass(frozen=True)
class RandomizedEnv(EnvWrapper):
    """A task to which ``events`` happen: docs/randomization.md.

    ``startup`` happens once for each row, and outlasts its episodes; ``reset`` at the start of each episode;
    ``interval`` before every control step after ``interval_step`` more. A row's draws depend on its own keys alone.
    Around another one, the two are one: its events come first, without those of a name that is given here.

    Args:
        env: the task. Events that change physics need its state to have ``physics``, and ``appearance(state)``.
        events: name -> {func, mode, interval_step, params}.
    Raises ConfigError: events that the task cannot have.
    """

    env: Any
    events: Any

    def __post_init__(self) -> None:
        if isinstance(self.env, RandomizedEnv):  # one state, and no event that writes what another does
            object.__setattr__(self, "events", {**self.env.events, **self.events})
            object.__setattr__(self, "env", self.env.env)
        freeze_fields(self, "events")
        if "geom_size" in self.read.parameters:
            boxes = (part for _, part in leaves(self.env.observation_space))
            if any(box.dtype == np.uint8 and len(box.shape or ()) == 3 for box in boxes):
                remedy = "leave out randomize_rigid_object_scale, or sensor"
                raise ValueError(f"pictures show the sizes of the model; {remedy}")

    @property
    def mirror(self) -> Any:
        return getattr(self.env, "mirror", None)  # what is drawn favours no side

    def inner_state(self, state: RandomizedState) -> PyTree:
        return state.env

    @functools.cached_property
    def read(self) -> RowEvents:
        env = self.env
        spaces: dict[Side, Any] = {"observation": env.observation_space, "action": env.action_space}
        return read_row_events(self.events, self._model, spaces, f"{type(env).__name__} has no MuJoCo physics")

    def reset(self, key: Key) -> tuple[RandomizedState, PyTree]:
        inner, obs = self.env.reset(key)
        curriculum = self.read.curriculum
        level = () if curriculum is None else jnp.asarray(curriculum.start, jnp.float32)
        # folded, not split: the task starts as it would without events
        seed = jax.random.key_data(jax.random.fold_in(key, _DRAWS))
        inner, drawn = self._draw(inner, seed, level)
        longest, no_action = self._longest, jnp.zeros(self.action_space.shape or ())
        state = RandomizedState(
            env=inner,
            drawn=drawn,
            actions=first(no_action, longest["action"]) if "action" in longest else (),
            observations=first(obs, longest["observation"]) if "observation" in longest else (),
            seed=seed,
            level=level,
            num_steps=jnp.zeros((), jnp.int32),
            episode_step=jnp.zeros((), jnp.int32),
        )
        return state, self._first_seen(state, obs)

    def persist(self, ended: RandomizedState, started: RandomizedState, obs: PyTree) -> tuple[PyTree, PyTree]:
        """Keep the level, the steps, and what was drawn at startup of the row."""
        # the task inside needs its own observation, not the late and noisy one that was shown
        looks_back = "observation" in self._longest
        true_obs = jax.tree.map(lambda x: x[0], started.observations) if looks_back else obs
        inner, true_obs = persist(self.env, ended.env, started.env, true_obs)
        state = replace(started, env=inner, level=ended.level, num_steps=ended.num_steps)
        # ``reset`` drew at the curriculum's start: the same seed at the row's level gives the draws that it should have
        if self.read.curriculum is not None:
            inner, drawn = self._draw(inner, started.seed, ended.level)
            state = replace(state, env=inner, drawn=drawn)
        # after the draws, which do not know what the row has kept since its first episode
        for event in self.read.physics:
            if event.mode == "startup":
                physics = keep_written(event.does, ended.env.physics, state.env.physics)
                state = replace(state, env=replace(state.env, physics=physics))
        kept = {event.name: ended.drawn[event.name] for event in self.read.sensing if event.mode == "startup"}
        state = replace(state, drawn={**state.drawn, **kept})
        if not looks_back:
            return state, true_obs
        state = replace(state, observations=first(true_obs, self._longest["observation"]))
        return state, self._first_seen(state, true_obs)

    def step(self, state: RandomizedState, action: Array, key: Key) -> tuple[RandomizedState, Timestep]:
        key_events, key_seen = jax.random.split(jax.random.fold_in(key, _DRAWS))
        if "action" in self._longest:
            state = replace(state, actions=push_newest(state.actions, action))
        action = self._sensed("action", state, action, key_events)
        inner, timestep = self.env.step(self._pushed(state, key_events), action, key)
        num_steps = state.num_steps + 1
        state = replace(state, env=inner, num_steps=num_steps, episode_step=state.episode_step + 1)
        if "observation" in self._longest:
            state = replace(state, observations=push_newest(state.observations, timestep.obs))
        timestep = replace(timestep, obs=self._sensed("observation", state, timestep.obs, key_seen))
        curriculum = self.read.curriculum
        if curriculum is None:
            return state, timestep
        if curriculum.by == "success" and "success" not in timestep.info:
            task = type(self.env).__name__
            raise ValueError(f"a curriculum by success: {task} reports no success; use by: steps, with num_steps")
        # an end raises or lowers the level of the next episode; this one's is drawn
        ended, success = timestep.terminated | timestep.truncated, timestep.info.get("success", jnp.zeros((), bool))
        state = replace(state, level=curriculum.after(state.level, num_steps, ended, success))
        info = {**timestep.info, "metrics": {**timestep.info.get("metrics", {}), LEVEL: state.level}}
        return state, replace(timestep, info=info)

    @functools.cached_property
    def _model(self) -> mujoco.MjModel | None:
        state = jax.eval_shape(self.env.reset, jax.random.key(0))[0]
        if not isinstance(self.env, AppearingEnv) or not isinstance(getattr(state, "physics", None), PhysicsState):
            return None
        return load_model(jax.eval_shape(self.env.appearance, state).asset)

    @functools.cached_property
    def _longest(self) -> dict[Side, int]:
        longest: dict[Side, int] = {}
        for sensing in (event.does for event in self.read.sensing):
            longest[sensing.side] = max(longest.get(sensing.side, 0), sensing.longest)
        return longest

    def _draw(self, inner: PyTree, seed: Array, level: Any) -> tuple[PyTree, dict[str, PyTree]]:
        key, level = jax.random.wrap_key_data(seed), self._level(level)
        drawn = {event.name: event.does.draw(event.key_of(key), level) for event in self.read.sensing}
        if not self.read.physics:
            return inner, drawn
        parameters = {name: jnp.asarray(value) for name, value in self.read.parameters.items()}
        physics = replace(inner.physics, parameters={**parameters, **inner.physics.parameters})
        for event in self.read.physics:
            if event.mode != "interval":
                physics = event.does.apply(physics, event.key_of(key), level)
        return replace(inner, physics=physics), drawn

    def _pushed(self, state: RandomizedState, key: Key) -> PyTree:
        for event in self.read.physics:
            if event.mode == "interval":
                old = state.env.physics
                new = event.does.apply(old, event.key_of(key), self._level(state.level))
                due = (state.episode_step > 0) & (state.episode_step % event.interval_step == 0)
                physics = jax.tree.map(lambda new, old, due=due: jnp.where(due, new, old), new, old)
                state = replace(state, env=replace(state.env, physics=physics))
        return state.env

    def _first_seen(self, state: RandomizedState, obs: PyTree) -> PyTree:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), _SEEN)  # apart from the episode's draws
        return self._sensed("observation", state, obs, key)

    def _sensed(self, side: Side, state: RandomizedState, x: PyTree, key: Key) -> PyTree:
        if side not in self._longest:
            return x
        events = [event for event in self.read.sensing if event.does.side == side]
        latency = [state.drawn[event.name] for event in events if event.does.add is None]
        x = late(state.actions if side == "action" else state.observations, latency[0] if latency else None)
        for event in events:
            if event.does.add is not None:
                x = event.does.add(x, state.drawn[event.name], event.key_of(key), self._level(state.level))
        return x

    def _level(self, level: PyTree) -> Array | None:
        return None if self.read.curriculum is None else level
