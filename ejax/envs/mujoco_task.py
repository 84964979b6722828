"""A MuJoCo task of one's own in one class: the model, what the policy sees, rewards, ends and starts.

    class Reach(MuJoCoTask):
        model = "reach.xml"

        def observe(self, world): ...
        def rewards(self, world, before): ...

Everything else has a default, and everything that ejax does with a task follows: engines, videos, pictures,
randomization, exports with names and units. docs/tutorials/own_task.md goes through one.

Such a class becomes a frozen dataclass where it is defined, as a Flax module does: annotated names are its arguments,
``env.cfg`` in a config. It is the only environment of ejax that is inherited from; what it makes is an
``ejax.types.Env`` like any other.
"""

import functools
import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.check import told
from ejax.envs.description import WHOLE, EnvDescription, Feature
from ejax.envs.mujoco.appearance import Appearance
from ejax.envs.mujoco.choice import choose_engine
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, check_physics, load_model, render, settings_changed
from ejax.envs.task.states import TaskState
from ejax.envs.task.world import World
from ejax.numerics.finite import all_finite
from ejax.schema.frozen import freeze, thaw
from ejax.schema.registry import did_you_mean
from ejax.types import Array, CameraView, Key, Timestep

_TOUCH = (int(mujoco.mjtSensor.mjSENS_TOUCH), int(mujoco.mjtSensor.mjSENS_CONTACT))
_LENGTHS = {int(mujoco.mjtJoint.mjJNT_HINGE): "rad", int(mujoco.mjtJoint.mjJNT_SLIDE): "m"}
"""Joints of one number, and its unit."""
_NEAR = 0.8
"""From here on a name reads like a misspelt one; helpers that do are given a leading underscore."""
_UNIT = re.compile(r"(?P<name>.*\S)\s*\[(?P<unit>[^\[\]]+)\]")


class _SensesContacts:
    """Of the class, before there is an instance: what a run's engine is chosen by."""

    def __get__(self, task: Any, kind: "type[MuJoCoTask]") -> bool:
        if not kind.model:  # of ``MuJoCoTask`` itself
            return False
        try:
            return bool(np.isin(load_model(_asset(kind)).sensor_type, _TOUCH).any())
        except ValueError:
            return False  # whoever makes the task says what is wrong with its model


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class MuJoCoTask:
    """A task on a MuJoCo model: subclass it.

        r = Σ weight·term,   terms of ``rewards``        control = mid + half·clip(a, ±1),   of each ctrlrange

    A step: ``control`` → physics for one control period → ``update`` → ``rewards``, ``fails``, ``succeeds`` →
    ``observe``. Terminated: ``fails``, or ``succeeds`` where ``ends_on_success``. Truncated: after ``episode_length``
    steps, or when the simulation broke.

    A method is given ``world``, the simulation at that moment, and some ``before``, as it was before the step:
    ``ejax.envs.task.world.World``. They are traced: ``jnp.where`` in place of ``if``.

    Class attributes:
        model: an MJCF file, looked for beside the class's own and from the working directory; or MJCF as text.
        keyframe: where episodes start from. Empty: the keyframe ``home``, or the first, or the model's reference pose.
        actions: the policy's numbers, ``"name [unit]"``, where ``control`` makes of them what actuators take. Empty:
            the actuators.

    Args:
        episode_length: time limit, control steps.
        control_period: s, a multiple of the MJCF's timestep.
        start_noise: rad and m, ± that is added to hinges and slides at the start, uniform, within their ranges.
        ends_on_success: False: an episode goes on, and counts as a success if it is one at its last step.
        weights: term of ``rewards`` -> its weight; 1 where none is given. Those given to the class's arguments change
            the class's own by name.
        randomization: the events of docs/randomization.md that belong to the task, in training and evaluation;
            ``trainer.events`` adds to them and replaces them by name.
        physics: the engine, see ``ejax.envs.mujoco.choice``.

    Raises:
        ValueError: a model that cannot be read, has no actuator or one without a ctrlrange, or remembers more than qpos
            and qvel; arguments out of range.
    """

    model: ClassVar[str] = ""
    keyframe: ClassVar[str] = ""
    actions: ClassVar[tuple[str, ...]] = ()
    senses_contacts: ClassVar[Any] = _SensesContacts()

    episode_length: int = 200
    control_period: float = 0.02
    start_noise: float = 0.01
    ends_on_success: bool = True
    weights: Mapping[str, float] = FrozenDict()
    randomization: Mapping[str, Any] = FrozenDict()
    physics: Engine = "auto"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited = {each.name: each.type for each in fields(MuJoCoTask)}
        inherited |= {each.name: each.type for base in cls.__mro__[1:] for each in _own_fields(base)}
        own = inspect.get_annotations(cls)
        # ``episode_length = 100`` without a type changes the default too, which a dataclass would not heed
        cls.__annotations__ = own | {
            name: kind for name, kind in inherited.items() if name in vars(cls) and name not in own
        }
        for name in cls.__annotations__:
            if isinstance(vars(cls).get(name), dict | list):
                setattr(cls, name, freeze(vars(cls)[name]))
        _refuse_misspelt(cls)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in ("episode_length", "control_period"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{kind}: {name} must be > 0, got {getattr(self, name)}")
        if not self.start_noise >= 0.0:
            raise ValueError(f"{kind}: start_noise must be >= 0, got {self.start_noise}")
        for each in fields(self):
            if isinstance(getattr(self, each.name), dict | list | FrozenDict):
                object.__setattr__(self, each.name, freeze(getattr(self, each.name)))
        object.__setattr__(self, "weights", freeze({**getattr(type(self), "weights", {}), **self.weights}))
        if wrong := {name: x for name, x in self.weights.items() if not isinstance(x, int | float)}:
            raise ValueError(f"{kind}: weights must be numbers, got {thaw(wrong)}")
        try:
            model = load_model(self.asset)
            _home(self.asset, self.keyframe)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
        check_physics(self.physics, self._num_substeps)
        _check_actuators(self, model)
        try:
            _ = self._observed
        except Exception as error:  # whatever it was, it is the subclass's own
            raise ValueError(f"{kind}: {told(error)}") from error

    def observe(self, world: World) -> Mapping[str, Array] | Array:
        """What the policy sees: numbers by name, ``"tip to goal [m]"``, which become one vector in this order, and its
        description; or an array [F], without one. Default: all joints' positions and velocities."""
        return {**world.joint_positions(), **world.joint_velocities()}

    def rewards(self, world: World, before: World) -> Mapping[str, Array]:
        """The terms of the reward: scalars by name, logged as ``rewards/<name>``. To be given."""
        del world, before
        raise NotImplementedError(f"{type(self).__name__} has no rewards(self, world, before); give it one")

    def fails(self, world: World) -> Array:
        """Whether the episode ends here without a success. bool. Default: never."""
        del world
        return jnp.zeros((), bool)

    def succeeds(self, world: World) -> Array:
        """Whether the task is done. bool. Without it nothing is logged as a success."""
        del world
        return jnp.zeros((), bool)

    def metrics(self, world: World) -> Mapping[str, Array]:
        """Scalars by name, logged as ``metrics/<name>``. Default: none."""
        del world
        return {}

    def start(self, key: Key, world: World) -> World:
        """The start of an episode.

        Args:
            world: the default start, at ``keyframe`` with ``start_noise``, at rest.
        """
        del key
        return world

    def control(self, world: World, action: Array) -> Array:
        """What the actuators are told for one control step: [nu].

        Args:
            action: [A], within ±1.
        """
        low, high = jnp.asarray(world.model.actuator_ctrlrange.T, action.dtype)
        return 0.5 * (low + high) + 0.5 * (high - low) * action

    def update(self, key: Key, world: World, before: World) -> World:
        """The world after the physics, with what else changes: a marker that moves, a number that is kept."""
        del key, before
        return world

    @property
    def asset(self) -> str:
        """The model, as in ``ejax.envs.mujoco.engine.Physics``."""
        return _asset(type(self))

    @property
    def max_episode_steps(self) -> int:
        return self.episode_length

    @property
    def description(self) -> EnvDescription:
        names = self._observed[1]
        return EnvDescription(
            observation={} if names is None else {WHOLE: names},
            action=_describe_actions(self),
            clips_actions=True,
            control_period=self.control_period,
            parameters=thaw(asdict(self)),
            notes=tuple(f"{type(self).__name__}: {text}" for text in settings_changed(self.asset)),
        )

    @property
    def observation_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-np.inf, np.inf, self._observed[0], np.float32)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (self._num_actions,), np.float32)

    def reset(self, key: Key) -> tuple[TaskState, Array]:
        key_noise, key_start = jax.random.split(key)
        world = self._start_of(key_noise, key_start)
        return world.state, self._observe(world)[0]

    def step(self, state: TaskState, action: Array, key: Key) -> tuple[TaskState, Timestep]:
        if action.shape != (self._num_actions,):
            raise ValueError(
                f"{type(self).__name__}.step takes an action of shape ({self._num_actions},), got {action.shape}"
            )
        before = self._world(state)
        action = jnp.clip(action, -1.0, 1.0)
        control = jnp.asarray(self.control(before, action))
        if control.shape != (before.model.nu,):
            raise ValueError(
                f"{type(self).__name__}.control gave shape {control.shape}; the model's actuators take "
                f"({before.model.nu},)"
            )
        engine = choose_engine(self.physics, sensing=type(self).senses_contacts).engine
        physics, readings = Physics(self.asset, engine, self._num_substeps).step_sensing(
            state.physics, control, state.markers
        )
        state = replace(
            state, physics=physics, action=action, readings=readings[-1], episode_step=state.episode_step + 1
        )
        world = self.update(key, self._world(state), before)
        return world.state, self._timestep(world, before)

    def render(
        self, state: TaskState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        return render(
            self.asset, state.physics.qpos, width=width, height=height, mocap_pos=state.markers, camera=camera
        )

    def appearance(self, state: TaskState) -> Appearance:
        """For ``ejax.envs.mujoco.raycast``."""
        return Appearance(asset=self.asset, qpos=state.physics.qpos, mocap_pos=state.markers)

    @property
    def _num_substeps(self) -> int:
        timestep = float(load_model(self.asset).opt.timestep)
        count = self.control_period / timestep
        if round(count) < 1 or abs(count - round(count)) > 1e-6 * count:
            near = [f"{n * timestep:g}" for n in (math.floor(count), math.ceil(count)) if n > 0]
            raise ValueError(
                f"{type(self).__name__}: control_period must be a multiple of the model's timestep of {timestep:g} s, "
                f"got {self.control_period}; give {' or '.join(near)}"
            )
        return round(count)

    @property
    def _num_actions(self) -> int:
        return len(self.actions) or int(load_model(self.asset).nu)

    @functools.cached_property
    def _observed(self) -> tuple[tuple[int, ...], tuple[Feature, ...] | None]:
        """Shape of the observation and the names of its numbers, None where it has none. Nothing is computed."""
        seen: list[tuple[Feature, ...] | None] = []

        def first() -> Array:
            world = self._start_of(*jax.random.split(jax.random.key(0)))
            obs, names = self._observe(world)
            seen.append(names)
            return obs

        return jax.eval_shape(first).shape, seen[-1]

    def _world(self, state: TaskState) -> World:
        return World(asset=self.asset, control_period=self.control_period, state=state)

    def _start_of(self, key_noise: Key, key_start: Key) -> World:
        model = load_model(self.asset)
        home, speed = _home(self.asset, self.keyframe)
        noise, low, high = _noise(model, self.start_noise)
        qpos = jnp.asarray(home, jnp.float32)
        if self.start_noise:
            moved = qpos + noise * jax.random.uniform(key_noise, (model.nq,), minval=-1.0, maxval=1.0)
            qpos = jnp.where(noise > 0.0, jnp.clip(moved, low, high), qpos)
        state = TaskState(
            physics=PhysicsState(qpos=qpos, qvel=jnp.asarray(speed, jnp.float32)),
            markers={
                model.body(i).name: jnp.asarray(model.body_pos[i], jnp.float32)
                for i in range(model.nbody)
                if model.body_mocapid[i] >= 0 and model.body(i).name
            },
            kept={},
            action=jnp.zeros(self._num_actions),
            readings=jnp.zeros(model.nsensordata),
            episode_step=jnp.zeros((), jnp.int32),
        )
        return self._sensed(self.start(key_start, self._sensed(self._world(state))))

    def _sensed(self, world: World) -> World:
        """The world with what its sensors read there, with all controls at 0."""
        if not world.model.nsensordata:
            return world
        state, engine = world.state, choose_engine(self.physics, sensing=type(self).senses_contacts).engine
        control = jnp.zeros(world.model.nu)
        _, readings = Physics(self.asset, engine, 1).step_sensing(state.physics, control, state.markers)
        return replace(world, state=replace(state, readings=readings[0]))

    def _observe(self, world: World) -> tuple[Array, tuple[Feature, ...] | None]:
        seen = self.observe(world)
        if not isinstance(seen, Mapping):
            return jnp.asarray(seen, jnp.float32), None
        if not seen:
            raise ValueError(f"{type(self).__name__}.observe gave no numbers")
        parts = {name: jnp.asarray(x, jnp.float32) for name, x in seen.items()}
        if odd := [f"{name} {x.shape}" for name, x in parts.items() if x.ndim > 1]:
            raise ValueError(f"{type(self).__name__}.observe: must be scalars and vectors, got {', '.join(odd)}")
        names = tuple(each for name, x in parts.items() for each in _features(name, x.shape))
        return jnp.concatenate([x.reshape(-1) for x in parts.values()]), names

    def _timestep(self, world: World, before: World) -> Timestep:
        terms = {name: jnp.asarray(x, jnp.float32) for name, x in self.rewards(world, before).items()}
        _check_terms(self, terms)
        rewards = {name: self.weights.get(name, 1.0) * x for name, x in terms.items()}
        finite = all_finite(world.state)
        failed = _truth(self, "fails", self.fails(world)) & finite
        info: dict[str, Any] = {"rewards": rewards}
        if metrics := dict(self.metrics(world)):
            info["metrics"] = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        terminated = failed
        if type(self).succeeds is not MuJoCoTask.succeeds:
            info["success"] = _truth(self, "succeeds", self.succeeds(world)) & ~failed & finite
            terminated = failed | info["success"] if self.ends_on_success else failed
        return Timestep(
            obs=self._observe(world)[0],
            reward=sum(rewards.values(), jnp.zeros(())),
            terminated=terminated,
            truncated=(world.state.episode_step >= self.episode_length) | ~finite,
            info=info,
        )


def _own_fields(base: type) -> tuple[Any, ...]:
    return fields(base) if "__dataclass_fields__" in vars(base) else ()


def _refuse_misspelt(cls: type) -> None:
    """Raises TypeError: a method or attribute that nothing would ever look at, named almost like one that is."""
    known = [name for name in (*dir(MuJoCoTask), *MuJoCoTask.__annotations__) if not name.startswith("_")]
    for name in vars(cls):
        if name.startswith("_") or name in known or name in cls.__annotations__:
            continue
        if near := did_you_mean(name, known, _NEAR):
            raise TypeError(f"{cls.__name__}.{name} is not used{near} If it is a helper, call it _{name}")


def _asset(kind: type[Any]) -> str:
    owner = next(each for each in kind.__mro__ if "model" in vars(each))
    return _find_model(str(kind.model), owner.__module__)


@functools.lru_cache(maxsize=64)
def _find_model(given: str, module: str) -> str:
    """MJCF as text as it is; of a file the absolute path, so that it is found from anywhere.

    Raises:
        ValueError: no model, or no such file.
    """
    if not given:
        raise ValueError("there is no model; write model = 'robot.xml', a file beside the class's, or MJCF as text")
    if given.lstrip().startswith("<"):
        return given
    file = getattr(sys.modules.get(module), "__file__", None)
    places = [*([Path(file).parent] if file else []), Path.cwd()]
    found = next((path for place in places if (path := place / given).is_file()), None)
    if found is None:
        near = sorted({path.name for place in places for path in place.glob("*.xml")})
        looked = " and in ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"no file {given} in {looked}{did_you_mean(given, near)}")
    return str(found.resolve())


def _check_actuators(task: MuJoCoTask, model: mujoco.MjModel) -> None:
    kind, own_control = type(task).__name__, type(task).control is not MuJoCoTask.control
    if not model.nu:
        raise ValueError(f"{kind}: the model has no actuators; give its MJCF an <actuator> section")
    if own_control:
        return
    if task.actions and len(task.actions) != model.nu:
        raise ValueError(
            f"{kind}: {len(task.actions)} actions for {model.nu} actuators; give control(self, world, action), which "
            "makes of the one what the other take"
        )
    for i in range(model.nu):
        if not model.actuator_ctrllimited[i]:
            raise ValueError(
                f"{kind}: actuator {_actuator_name(model, i)!r} has no ctrlrange, which actions of ±1 are scaled to; "
                "write one into the MJCF, or give control(self, world, action)"
            )


def _truth(task: MuJoCoTask, name: str, given: Any) -> Array:
    x = jnp.asarray(given)
    if x.shape or x.dtype != bool:
        raise ValueError(
            f"{type(task).__name__}.{name} must be true or false, got {x.dtype}{list(x.shape)}; compare numbers, "
            "and make one of several by .any() or .all()"
        )
    return x


def _check_terms(task: MuJoCoTask, terms: Mapping[str, Array]) -> None:
    kind = type(task).__name__
    if not terms:
        raise ValueError(f"{kind}.rewards gave no terms")
    if odd := [f"{name} {x.shape}" for name, x in terms.items() if x.shape]:
        raise ValueError(f"{kind}.rewards: every term must be a scalar, got {', '.join(odd)}")
    for name in task.weights:
        if name not in terms:
            raise ValueError(
                f"{kind}: weights names no term '{name}'; there is {', '.join(terms)}{did_you_mean(name, terms)}"
            )


@functools.lru_cache(maxsize=64)
def _home(asset: str, keyframe: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """qpos [nq] and qvel [nv] to start from.

    Raises:
        ValueError: no such keyframe.
    """
    model = load_model(asset)
    names = [model.key(i).name for i in range(model.nkey)]
    if keyframe and keyframe not in names:
        there = f"there is {', '.join(map(repr, names))}" if names else "the model has none"
        raise ValueError(f"no keyframe '{keyframe}'; {there}{did_you_mean(keyframe, names)}")
    if not names:
        return model.qpos0.copy(), np.zeros(model.nv)
    wanted = keyframe or ("home" if "home" in names else names[0])
    at = names.index(wanted)
    return model.key_qpos[at].copy(), model.key_qvel[at].copy()


def _noise(model: mujoco.MjModel, size: float) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """[nq] each: how far a number may be moved, and its bounds."""
    noise, low, high = (np.full(model.nq, x, np.float32) for x in (0.0, -np.inf, np.inf))
    for i in range(model.njnt):
        if int(model.jnt_type[i]) in _LENGTHS:
            noise[model.jnt_qposadr[i]] = size
            if model.jnt_limited[i]:
                low[model.jnt_qposadr[i]], high[model.jnt_qposadr[i]] = model.jnt_range[i]
    return noise, low, high


def _features(name: str, shape: tuple[int, ...]) -> tuple[Feature, ...]:
    """The numbers of one part of an observation: ``"tip to goal [m]"`` with three of them is x, y and z, in m."""
    match = _UNIT.fullmatch(name)
    text, unit = (match["name"], match["unit"]) if match else (name, "1")
    if not shape:
        return (Feature(text, unit),)
    (size,) = shape
    letters = "wxyz" if size == 4 and "quaternion" in name else "xyz" if size == 3 else ""
    return tuple(Feature(f"{text} {letters[i] if letters else i}", unit) for i in range(size))


def _describe_actions(task: MuJoCoTask) -> tuple[Feature, ...]:
    if task.actions:
        return tuple(each for name in task.actions for each in _features(name, ()))
    model = load_model(task.asset)
    if type(task).control is not MuJoCoTask.control:
        return tuple(Feature(f"{_actuator_name(model, i)} action", "1") for i in range(model.nu))
    return tuple(_describe_actuator(model, i) for i in range(model.nu))


def _describe_actuator(model: mujoco.MjModel, i: int) -> Feature:
    """What ±1 of an action means: a servo's target, a motor's force, or just its control."""
    low, high = model.actuator_ctrlrange[i]
    gain, bias = model.actuator_gainprm[i], model.actuator_biasprm[i]
    gear = model.actuator_gear[i]
    on_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT and not gear[1:].any()
    joint = int(model.actuator_trnid[i, 0])
    kind = int(model.jnt_type[joint]) if on_joint else -1
    length = _LENGTHS.get(kind)
    fixed = model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED
    what, unit, scale = "control", "1", 1.0
    if length and fixed and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE:
        what, unit = ("torque", "N m") if length == "rad" else ("force", "N")
        scale = float(gain[0] * gear[0])
    elif length and fixed and gear[0] == 1.0 and bias[1] == -gain[0] and gain[0]:
        what, unit = "target angle" if length == "rad" else "target position", length
    elif length and fixed and gear[0] == 1.0 and not bias[1] and bias[2] == -gain[0]:
        what, unit = "target velocity", f"{length}/s"
    return Feature(f"{_actuator_name(model, i)} {what}, -1 to 1 for {scale * low:g} to {scale * high:g}", unit)


def _actuator_name(model: mujoco.MjModel, i: int) -> str:
    """An actuator's name; where it has none, its joint's."""
    if name := model.actuator(i).name:
        return name
    if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT:
        return model.joint(int(model.actuator_trnid[i, 0])).name or f"actuator {i}"
    return f"actuator {i}"
