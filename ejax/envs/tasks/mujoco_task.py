"""A user's MuJoCo task in one class, which becomes a frozen dataclass where it is defined: annotated names are its
arguments, ``env.cfg`` in a config. See docs/tutorials/01_own_task.md."""

import functools
import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, dataclass_transform

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from ejax.envs.description import WHOLE, EnvDescription, Feature
from ejax.envs.mujoco.engine import Engine, PhysicsState, load_model
from ejax.envs.mujoco.models import settings_changed
from ejax.envs.task.entities import home_of, look_up
from ejax.envs.task.mjcf import (
    actuator_name,
    check_actuators,
    describe_actuator,
    find_model,
    name_numbers,
    start_changed,
    start_noise_of,
)
from ejax.envs.task.terms import Added, Outcome
from ejax.envs.task.world import TaskState, World
from ejax.envs.tasks.physics_task import PhysicsTask
from ejax.schema.frozen import freeze, thaw
from ejax.schema.messages import describe_error, did_you_mean
from ejax.types import Array, Key

_NEAR = 0.8  # From here on a name reads like a misspelt one; helpers that do are given a leading underscore


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class MuJoCoTask(PhysicsTask):
    """A task on a MuJoCo model: subclass it.

        r = Σ weight·term,   terms of ``rewards``        control = mid + half·clip(a, ±1),   of each ctrlrange

    For the order of a step see ``ejax.envs.task.terms``. Terminated: ``fails``, or ``succeeds`` where
    ``ends_on_success``. Truncated: after ``episode_length`` steps, or when the simulation broke. Methods get the
    ``world`` at that moment, and some ``before``, as it was before the step. They are traced: no ``if``.

    Class attributes:
        keyframe: where episodes start from, by name or number: joints, controls that sensors are read under, mocap
            bodies. Empty: the keyframe ``home``, or the first, or the model's reference pose.
        actions: the policy's numbers, ``"name [unit]"``, for a custom ``control``. Empty: the actuators.
        terms: ``ejax.envs.task.terms.Term``s in addition to the methods: rewards, terminations, events.

    Args:
        model: an MJCF file, such as a robot folder's ``scene.xml``, or MJCF as text. The class's is looked for next to
            its file and from the working directory, an argument from the working directory.
        episode_length: control steps.
        control_period: s, a multiple of the MJCF's timestep.
        start_noise: rad and m, ± that is added to hinges and slides at the start, uniform, within their ranges; not to
            joints under an equality or a tendon's limits, which it would break.
        ends_on_success: False: an episode continues, and counts as a success if it is one at its last step.
        weights: term of ``rewards`` -> its weight, else 1; or a new term, {func, weight, params}, as in a gym config.
            Those given as an argument change the class's own by name.
        randomization: the task's events, in training and evaluation; ``trainer.events`` adds to them and replaces them.

    Raises:
        ValueError: a model that cannot be read, has no actuator or one without a ctrlrange, or remembers more than qpos
            and qvel; arguments out of range.
    """

    keyframe: ClassVar[str | int] = ""
    actions: ClassVar[tuple[str, ...]] = ()

    model: str = field(default="", repr=False)  # it may be a long text
    episode_length: int = 200
    control_period: float = 0.02
    start_noise: float = 0.01
    ends_on_success: bool = True
    weights: Mapping[str, Any] = FrozenDict()
    randomization: Mapping[str, Any] = FrozenDict()
    physics: Engine = "auto"
    functor_events: Mapping[str, Any] = FrozenDict()
    clips_actions = True
    reward_field = "weights"
    positive = ("episode_length", "control_period")
    not_negative = ("start_noise",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        bases = [base for base in cls.__mro__[1:] if "__dataclass_fields__" in vars(base)]
        inherited = {each.name: each.type for base in bases for each in fields(base)}
        own = inspect.get_annotations(cls)
        # ``episode_length = 100`` without a type changes the default too, which a dataclass would not heed
        cls.__annotations__ = own | {
            name: kind for name, kind in inherited.items() if name in vars(cls) and name not in own
        }
        # a class attribute is shared by all instances, and a static argument has to be hashable
        for name in cls.__annotations__:
            if isinstance(vars(cls).get(name), dict | list):
                setattr(cls, name, freeze(vars(cls)[name]))
        known = [name for name in (*dir(MuJoCoTask), *MuJoCoTask.__annotations__) if not name.startswith("_")]
        for name in vars(cls):
            # what nothing would look at, named almost like something that is used
            used = name.startswith("_") or name in known or name in cls.__annotations__
            if not used and (near := did_you_mean(name, known, _NEAR)):
                raise TypeError(f"{cls.__name__}.{name} is not used{near} If it is a helper, call it _{name}")
        if "model" in vars(cls):
            cls.model = field(default=cls.model, repr=False)
        dataclass(frozen=True, kw_only=True)(cls)

    def check_fields(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        # by name over the class's own: a config changes one weight without repeating the others
        object.__setattr__(self, "weights", freeze({**getattr(type(self), "weights", {}), **self.weights}))
        if wrong := {name: x for name, x in self.weights.items() if not isinstance(x, Mapping | int | float)}:
            raise ValueError(f"weights must be numbers, got {thaw(wrong)}")
        model = load_model(self.asset)
        home_of(self.asset, self.keyframe)
        # after the model: the number of substeps follows from its timestep
        super().check_fields()
        check_actuators(model, len(self.actions), self._has_control)
        try:
            _ = self._observed
        except Exception as error:  # any error here is the subclass's own
            raise ValueError(describe_error(error)) from error

    def observe(self, world: World) -> Mapping[str, Array] | Array:
        """Compute the observation: numbers by name, ``"tip to goal [m]"``, which become one vector in this order,
        or an array [F] without a description. Default: all joints' positions and velocities."""
        return {**world.joint_positions(), **world.joint_velocities()}

    def start(self, key: Key, world: World) -> World:  # type: ignore[override]  # it has a default start to change
        """Start an episode. ``world`` is the default start: at ``keyframe`` with ``start_noise``."""
        del key
        return world

    def rewards(self, world: World, before: World) -> Mapping[str, Array]:
        """Compute the terms of the reward: scalars by name. Default: none."""
        del world, before
        return {}

    def control(self, world: World, action: Array) -> Array:
        """Compute the actuators' control [nu] for one control step; ``action`` [A] is within ±1."""
        low, high = jnp.asarray(world.model.actuator_ctrlrange.T, action.dtype)
        return 0.5 * (low + high) + 0.5 * (high - low) * action

    @functools.cached_property  # a name may mean another file in another working directory
    def asset(self) -> str:
        cls, given = type(self), self.model
        if not isinstance(given, str):
            raise ValueError(f"model must be a file or MJCF as text, got {given!r}; for an MjSpec, use its to_xml()")
        owner = next(each for each in cls.__mro__ if "model" in vars(each))
        own = given == os.fspath(cls.model)  # the class's own file lies beside it
        return find_model(given, owner.__module__ if own else "")

    @property
    def description(self) -> EnvDescription:
        texts = [*settings_changed(self.asset), *start_changed(self.asset, self.keyframe, self.start_noise)]
        notes = tuple(f"{type(self).__name__}: {text}" for text in texts)
        parameters = thaw(asdict(self))
        if self.model.lstrip().startswith("<"):  # too long a text
            del parameters["model"]
        return replace(super().description, parameters=parameters, notes=notes)

    def world(self, state: Any) -> World:
        return replace(super().world(state), keyframe=self.keyframe)

    @property
    def parts(self) -> Mapping[str, tuple[Feature, ...]]:
        names = self._observed[1]
        return {} if names is None else {WHOLE: names}

    @property
    def action_features(self) -> tuple[Feature, ...]:
        if self.actions:
            return tuple(each for name in self.actions for each in name_numbers(name, ()))
        model = load_model(self.asset)
        if self._has_control:
            return tuple(Feature(f"{actuator_name(model, i)} action", "1") for i in range(model.nu))
        return tuple(describe_actuator(model, i) for i in range(model.nu))

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-np.inf, np.inf, self._observed[0], np.float32)

    def apply_start_events(self, key: Key, world: World) -> World:
        begun = super().apply_start_events(key, world)
        # what events move changes the sensors' readings
        return world if begun is world else self._sensed(begun)

    @property
    def _has_control(self) -> bool:
        return type(self).control is not MuJoCoTask.control

    @property
    def num_substeps(self) -> int:
        timestep = float(load_model(self.asset).opt.timestep)
        count = self.control_period / timestep
        if round(count) < 1 or abs(count - round(count)) > 1e-6 * count:
            near = [f"{n * timestep:g}" for n in (math.floor(count), math.ceil(count)) if n > 0]
            raise ValueError(
                f"control_period must be a multiple of the model's timestep of {timestep:g} s, got "
                f"{self.control_period}; use {' or '.join(near)}"
            )
        return round(count)

    @functools.cached_property
    def _observed(self) -> tuple[tuple[int, ...], tuple[Feature, ...] | None]:
        """Shape of the observation and the names of its numbers, None where it has none. Nothing is computed."""
        # names are not arrays, so they leave the trace by a list
        seen: list[tuple[Feature, ...] | None] = []

        def first() -> Array:
            obs, names = self._observe(self.first_world(jax.random.key(0)))
            seen.append(names)
            return obs

        return jax.eval_shape(first).shape, seen[-1]

    def first_world(self, key: Key) -> World:
        key_noise, key_start = jax.random.split(key)
        model = load_model(self.asset)
        home, markers = home_of(self.asset, self.keyframe)
        noise, low, high = start_noise_of(self.asset, self.start_noise)
        qpos = jnp.asarray(home.qpos, jnp.float32)
        if self.start_noise:
            moved = qpos + noise * jax.random.uniform(key_noise, (model.nq,), minval=-1.0, maxval=1.0)
            qpos = jnp.where(noise > 0.0, jnp.clip(moved, low, high), qpos)
        state = TaskState(
            physics=PhysicsState(qpos=qpos, qvel=jnp.asarray(home.qvel, jnp.float32)),
            markers={name: jnp.asarray(place, jnp.float32) for name, place in markers.items()},
            kept={},
            action=jnp.zeros(len(self.action_features)),
            readings=jnp.zeros(model.nsensordata),
            episode_step=jnp.zeros((), jnp.int32),
        )
        # sensed twice: ``start`` may read a sensor, and what it moves changes the readings
        return self._sensed(self.start(key_start, self._sensed(self.world(state))))

    def _sensed(self, world: World) -> World:
        """Return the world with what its sensors read there, under the keyframe's controls."""
        if not world.model.nsensordata:
            return world
        state, one_step = world.state, replace(self.simulation, num_substeps=1)
        ctrl = jnp.asarray(home_of(self.asset, self.keyframe)[0].ctrl, jnp.float32)
        _, readings = one_step.step_sensing(state.physics, ctrl, state.markers)
        return replace(world, state=replace(state, readings=readings[0]))

    def observe_noisy(self, world: World, key: Key) -> World:
        return replace(world, obs=self._observe(world)[0])

    def _observe(self, world: World) -> tuple[Array, tuple[Feature, ...] | None]:
        seen = self.observe(world)
        if not isinstance(seen, Mapping):
            return jnp.asarray(seen, jnp.float32), None
        if not seen:
            raise ValueError(f"{type(self).__name__}.observe gave no numbers")
        parts = {name: jnp.asarray(x, jnp.float32) for name, x in seen.items()}
        if odd := [f"{name} {x.shape}" for name, x in parts.items() if x.ndim > 1]:
            raise ValueError(f"{type(self).__name__}.observe: must be scalars and vectors, got {', '.join(odd)}")
        names = tuple(each for name, x in parts.items() for each in name_numbers(name, x.shape))
        return jnp.concatenate([x.reshape(-1) for x in parts.values()]), names

    def advance(self, world: World, action: Array) -> TaskState:
        control = jnp.asarray(self.control(world, action))
        if control.shape != (takes := (world.model.nu,)):
            text = f"gave shape {control.shape}; the model's actuators take {takes}"
            raise ValueError(f"{type(self).__name__}.control {text}")
        state = world.state
        # of the last physics step: earlier ones are of places that the policy never sees
        physics, readings = self.simulation.step_sensing(state.physics, control, state.markers)
        return replace(state, physics=physics, action=action, readings=readings[-1])

    def outcome(self, world: World) -> Outcome:
        outcome = super().outcome(world)
        return replace(outcome, metrics={name: jnp.asarray(x, jnp.float32) for name, x in outcome.metrics.items()})

    def reward_terms(self, world: World, before: World) -> Mapping[str, Array]:
        return self.rewards(world, before)

    reward_names = None

    @property
    def added(self) -> Added:
        # numbers need no table of functors
        if self.functor_events or any(isinstance(x, Mapping) for x in self.weights.values()):
            return super().added
        return Added(weights=self.weights)

    def total(self, world: World, outcome: Outcome) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        kind, (reward, weighted, raw) = type(self).__name__, super().total(world, outcome)
        if not raw:
            raise ValueError(f"{kind}.rewards gave no terms")
        for name in self.weights:
            look_up("term", name, raw, f"{kind}: weights names ")
        return reward, weighted, raw
