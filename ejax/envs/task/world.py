"""A simulation at one moment, by the names of its model: what every task's terms are computed from. Poses, [4, 4], m,
and velocities are exact at every step; a sensor lags, see ``World.sensor``. Frames: the world's of the MJCF; in a gym
config the arena's, whose origin EmbodiChain puts the robot's base at."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct
from numpy.typing import ArrayLike, NDArray

from ejax.envs.mujoco.drawing import Appearance
from ejax.envs.mujoco.engine import PhysicsState, load_model
from ejax.envs.mujoco.kinematics import body_pose, rate_of_qpos, site_pose, times_constant, transform
from ejax.envs.mujoco.rotations import make_pose, matrix_from_quaternion, quaternion_from_matrix
from ejax.envs.task.entities import BALL, FREE, find_entity, fitting, home_of, joint_slices, name_joint, pose_slots
from ejax.envs.task.terms import Snapshot
from ejax.schema.paths import unique
from ejax.types import Array


@struct.dataclass(kw_only=True)
class TaskState:
    """One episode of a ``MuJoCoTask``: arrays only, as in the states of all tasks."""

    physics: PhysicsState
    markers: dict[str, Array]  # Mocap body -> its place [3], m; with its quaternion, [7], where a keyframe turns it
    kept: dict[str, Array]  # Numbers that the task remembers, by its own names
    action: Array  # [A]: the last, within ±1; zeros at the start
    readings: Array  # [nsensordata]: see ``World.sensor``
    episode_step: Array  # Control steps done, int32


@struct.dataclass(kw_only=True)
class SceneState:
    """One episode of a gym config's scene, whose joints have drives."""

    physics: PhysicsState
    """qpos: joints, then position and quaternion (w x y z) of each dynamic object; qvel likewise, 6 an object."""
    target: Array  # [J]: target positions of the drives, m or rad
    velocity_target: Array  # [J], m/s or rad/s
    effort: Array  # [J]: efforts added to the drives' forces, N or N·m
    kept: dict[str, Array]  # Virtual targets by their key, [4, 4]: all that a gym config's events store
    action: Array  # [A]: the policy's last action, as it gave it; zeros before the first step
    episode_step: Array  # Control steps done, int32
    history: dict[str, Array] = struct.field(default_factory=dict)
    """Observation with a history -> its last values, [history_length, ...], the newest at the end."""

    @property
    def markers(self) -> dict[str, Array]:
        """A disc is drawn at each virtual target."""
        return {marker_name(key): pose[:3, 3] for key, pose in self.kept.items()}


def marker_name(key: str) -> str:
    """Name the body that is drawn where the virtual target ``key`` is."""
    return f"target {key}"


@dataclass(frozen=True)
class Frame:
    """The pose and the motion of a body or a site, in the world."""

    position: Array  # [3], m
    rotation: Array  # [3, 3]: its columns are the frame's x, y and z axes in the world
    _rate: Callable[[], Array] = field(repr=False)

    @property
    def velocity(self) -> Array:
        """[3], m/s, in the world's axes."""
        return self._rate()[:3, 3]

    @property
    def angular_velocity(self) -> Array:
        """[3], rad/s, in the world's axes: the ω of Ṙ = [ω]ₓ R."""
        # full precision: a GPU's TF32 would leave a skew matrix off by 1e-3
        spin = jnp.matmul(self._rate()[:3, :3], self.rotation.T, precision="highest")
        return jnp.stack([spin[2, 1], spin[0, 2], spin[1, 0]])


@dataclass(frozen=True)
class JointState:
    """A joint's own numbers: of a hinge (rad, rad/s) and a slide (m, m/s) scalars; of a ball joint a quaternion [4] and
    [3] rad/s; of a free joint [7] m and quaternion, and [6] m/s in the world's axes and rad/s in the body's."""

    position: Array
    velocity: Array


@struct.dataclass(kw_only=True)
class World(Snapshot):
    """A simulation at one moment; a pytree. Methods that change something return changed copies. A name that the model
    lacks is refused with those that it has: ValueError. A gym config's is a ``SceneWorld``, VelocityRL's a
    ``LeggedWorld``."""

    asset: str = struct.field(pytree_node=False)
    control_period: float = struct.field(pytree_node=False)
    markers_of: Callable[[Any], dict[str, Array]] | None = struct.field(pytree_node=False, default=None)
    """The task's, of a state without ``markers``."""
    keyframe: str | int | None = struct.field(pytree_node=False, default=None)
    """Start of an MJCF's episodes. None: its reference pose."""

    if not TYPE_CHECKING:  # a type checker must still find misspelt names

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that failed: its error, not this one
                return object.__getattribute__(self, name)
            text = "only a gym config has control parts, drives and cameras, and only VelocityRL has a legged robot"
            raise AttributeError(f"this world has no '{name}': {text}")

    @property
    def model(self) -> mujoco.MjModel:
        """For constants; not to be changed. What only shows, such as geoms that collide with nothing, is not in it."""
        return load_model(self.asset)

    @property
    def physics(self) -> PhysicsState:
        return self.state.physics

    @property
    def qpos(self) -> Array:
        """[nq], m, rad, unit quaternions (w x y z); of a gym config [active joints]."""
        return self.physics.qpos

    @property
    def qvel(self) -> Array:
        """[nv], m/s, rad/s; of a gym config [active joints]."""
        return self.physics.qvel

    @property
    def time(self) -> Array:
        """s since the episode's start, at the end of the step."""
        return self.state.episode_step * self.control_period

    @property
    def markers(self) -> dict[str, Array]:
        """Mocap body -> its place [3], m; of one that the keyframe turns its pose [7], with a quaternion."""
        return self.state.markers if self.markers_of is None else self.markers_of(self.state)

    @property
    def kept(self) -> dict[str, Array]:
        """Numbers that ``keep`` stored; none of a task that stores nothing."""
        return self.state.kept if isinstance(self.state, TaskState | SceneState) else {}

    @property
    def joints(self) -> tuple[int, ...]:
        """Numbers of all joints of one number."""
        return tuple(i for i in range(self.model.njnt) if self.model.jnt_type[i] not in (FREE, BALL))

    @property
    def active(self) -> tuple[int, ...]:
        """Numbers of the joints that are observed and acted on, in the robot's order."""
        return self.joints

    @property
    def limits(self) -> Array:
        """[active joints, 2]: lowest and highest position."""
        return jnp.asarray(self.model.jnt_range[list(self.active)].astype(np.float32))

    def body(self, name: str) -> Frame:
        """Get a body's frame; a marker's too."""
        return self._frame(find_entity(self.model, "body", name), np.eye(4))

    def site(self, name: str) -> Frame:
        model = self.model
        site = find_entity(model, "site", name)
        return self._frame(int(model.site_bodyid[site]), transform(model.site_pos[site], model.site_quat[site]))

    def joint(self, name: str) -> JointState:
        model, physics = self.model, self.physics
        joint = find_entity(model, "joint", name)
        places, speeds = joint_slices(model, joint)
        if model.jnt_type[joint] in (FREE, BALL):
            return JointState(physics.qpos[places], physics.qvel[speeds])
        return JointState(physics.qpos[places.start], physics.qvel[speeds.start])

    def sensor(self, name: str) -> Array:
        """Read a sensor's numbers [its dim], as of the last physics step's beginning, so one physics step ago, with
        markers where they were during that step. At an episode's start: of the start, under the keyframe's controls."""
        model = self.model
        sensor = find_entity(model, "sensor", name)
        start = int(model.sensor_adr[sensor])
        return self.state.readings[start : start + int(model.sensor_dim[sensor])]

    def joint_positions(self, *names: str) -> dict[str, Array]:
        """``{"hip angle [rad]": …}``: positions of these joints, by default of all, for an observation."""
        return self._named(names, self.physics.qpos, 0)

    def joint_velocities(self, *names: str) -> dict[str, Array]:
        """``{"hip velocity [rad/s]": …}``, as ``joint_positions``."""
        return self._named(names, self.physics.qvel, 1)

    def eef_pose(self, part: str | None = None, qpos: Array | None = None) -> Array:
        """[4, 4]: the tool centre point, the site ``tcp``, by forward kinematics of ``qpos`` [J], by default the
        current ones. ``part`` None: the one with the tool. Raises ValueError: it, or the model, has none."""
        # an MJCF alone has no parts, but may have the site
        if part is not None:
            raise ValueError(f"only a gym config has control parts, and this task is an MJCF alone; got part '{part}'")
        find_entity(self.model, "site", "tcp")
        return site_pose(self.model, "tcp", self.physics.qpos if qpos is None else qpos)

    def body_pose(self, name: str) -> Array:
        """[4, 4]: a body of the model, such as a link of the robot."""
        pose = body_pose(self.model, find_entity(self.model, "body", name), self.physics.qpos, self.markers)
        return jnp.asarray(pose, jnp.float32)

    def has_object(self, uid: str) -> bool:
        """Return whether the model has a body of this name."""
        return mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_BODY, uid) >= 0

    def initial_pose(self, uid: str) -> Array:
        """[4, 4]: where the MJCF puts an object."""
        home, markers = home_of(self.asset, self.keyframe)
        qpos = jnp.asarray(home.qpos, self.physics.qpos.dtype)
        return body_pose(self.model, find_entity(self.model, "body", uid), qpos, markers)

    def object_pose(self, uid: str) -> Array:
        """[4, 4]: an object, which is a body that moves freely or stands."""
        slots = self._slots(uid)
        if slots is None:
            return self.body_pose(uid)
        # read off qpos, whose slots are the pose: no kinematics to compute
        pose = self.physics.qpos[slots[0] : slots[0] + 7]
        return make_pose(pose[:3], matrix_from_quaternion(pose[3:]))

    def object_velocity(self, uid: str) -> Array:
        """[6]: an object's velocity: linear (m/s) and angular (rad/s), in the world's frame; 0 of one that stands."""
        slots = self._slots(uid)
        if slots is None:
            return jnp.zeros(6)
        linear, angular = jnp.split(self.physics.qvel[slots[1] : slots[1] + 6], 2)
        return jnp.concatenate([linear, self.object_pose(uid)[:3, :3] @ angular])  # it turns in its own frame

    def pose(self, key: str) -> Array:
        """[4, 4]: a virtual target. Raises ValueError: none is stored under the key."""
        if key not in self.kept:
            text = f"no target pose '{key}' is stored; there is {', '.join(sorted(self.kept)) or 'none'}"
            raise ValueError(f"{text}. Add an event randomize_target_pose with store_key '{key}'")
        return self.kept[key]

    def with_joint(self, name: str, position: ArrayLike | None = None, velocity: ArrayLike | None = None) -> Self:
        """Put a joint elsewhere, or let it move otherwise; shapes as of ``joint``."""
        model, physics = self.model, self.physics
        places, speeds = joint_slices(model, find_entity(model, "joint", name))
        if position is not None:
            qpos = physics.qpos.at[places].set(fitting(f"joint '{name}', position", position, places, physics.qpos))
            physics = replace(physics, qpos=qpos)
        if velocity is not None:
            qvel = physics.qvel.at[speeds].set(fitting(f"joint '{name}', velocity", velocity, speeds, physics.qvel))
            physics = replace(physics, qvel=qvel)
        return self._with(physics=physics)

    def with_qpos(self, joints: tuple[int, ...], qpos: Array) -> Self:
        """Move joints of one number, by their numbers in the model, to ``qpos`` [joints], rad or m, at rest."""
        model, physics = self.model, self.physics
        places, speeds = jnp.array(model.jnt_qposadr[list(joints)]), jnp.array(model.jnt_dofadr[list(joints)])
        physics = replace(physics, qpos=physics.qpos.at[places].set(qpos), qvel=physics.qvel.at[speeds].set(0.0))
        return self._with(physics=physics)

    def with_object_pose(self, uid: str, pose: Array) -> Self:
        """Put an object that moves freely elsewhere, at rest. Raises ValueError: it stands."""
        slots, physics = self._slots(uid), self.physics
        if slots is None:
            raise ValueError(f"rigid object '{uid}' is static: it cannot be moved; set body_type to 'dynamic'")
        placed = jnp.concatenate([pose[:3, 3], quaternion_from_matrix(pose[:3, :3])])
        qpos = physics.qpos.at[slots[0] : slots[0] + 7].set(placed)
        qvel = physics.qvel.at[slots[1] : slots[1] + 6].set(0)
        return self._with(physics=replace(physics, qpos=qpos, qvel=qvel))

    def place(self, body: str, position: ArrayLike, quaternion: ArrayLike | None = None) -> Self:
        """Move a body that moves freely, or a marker, which is a mocap body, to ``position`` [3], m, and ``quaternion``
        [4] (w x y z, of a free body; None: as it is). A marker pushes aside what it collides with, from the next step
        on. Raises ValueError: a body that hangs on others; a marker's quaternion."""
        model, physics = self.model, self.physics
        index = find_entity(model, "body", body)
        if model.body_mocapid[index] >= 0:
            if quaternion is not None:
                raise ValueError(f"place: the marker '{body}' has a position only; leave out the quaternion")
            there, quaternion = fitting(f"marker '{body}'", position, slice(0, 3), physics.qpos), self.markers[body][3:]
            return self._with(markers={**self.state.markers, body: jnp.concatenate([there, quaternion])})
        slots = pose_slots(model, index)
        if slots is None:
            bodies = map(model.body, range(model.nbody))
            free = [each.name for each in bodies if each.mocapid[0] >= 0 or pose_slots(model, each.id)]
            text = f"place: '{body}' neither moves freely nor is a marker (<body mocap='true'>)"
            raise ValueError(f"{text}; there is {', '.join(free) or 'none'}; with_joint moves what hangs on joints")
        where, turn = slice(slots[0], slots[0] + 3), slice(slots[0] + 3, slots[0] + 7)
        qpos = physics.qpos.at[where].set(fitting(f"body '{body}', position", position, where, physics.qpos))
        if quaternion is not None:
            qpos = qpos.at[turn].set(fitting(f"body '{body}', quaternion", quaternion, turn, physics.qpos))
        return self._with(physics=replace(physics, qpos=qpos))

    def keep(self, **values: ArrayLike) -> Self:
        """Remember these numbers in ``kept``. An episode's start sets all that there will be, in their final shapes."""
        if not isinstance(self.state, TaskState | SceneState):
            raise ValueError(f"this task stores no numbers, nor {', '.join(values)}; a gym config and MuJoCoTask do")
        return self._with(kept={**self.state.kept, **{name: jnp.asarray(x) for name, x in values.items()}})

    def appearance(self) -> Appearance:
        return Appearance(asset=self.asset, qpos=self.physics.qpos, mocap_pos=self.markers)

    def _with(self, **changes: Any) -> Self:
        return replace(self, state=replace(self.state, **changes))

    def _slots(self, uid: str) -> tuple[int, int] | None:
        return pose_slots(self.model, find_entity(self.model, "body", uid))

    def _frame(self, body: int, local: NDArray[np.float64]) -> Frame:
        model, physics = self.model, self.physics

        def pose_at(qpos: Array) -> Array:
            return jnp.asarray(times_constant(body_pose(model, body, qpos, self.markers), local), qpos.dtype)

        # on demand: forward derivatives cost as much again, and most terms want places only
        def rate() -> Array:
            return jax.jvp(pose_at, (physics.qpos,), (rate_of_qpos(model, physics.qpos, physics.qvel),))[1]

        pose = pose_at(physics.qpos)
        return Frame(pose[:3, 3], pose[:3, :3], rate)

    def _named(self, names: Iterable[str], values: Array, side: int) -> dict[str, Array]:
        model, named = self.model, list[tuple[str, Array]]()
        for joint in [find_entity(model, "joint", name) for name in names] or range(model.njnt):
            start = joint_slices(model, joint)[side].start
            for name, size in name_joint(model, joint)[side]:
                named.append((name, values[start] if size == 1 else values[start : start + size]))
                start += size
        return unique(named, "numbers of joints")
