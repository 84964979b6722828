"""A legged robot tracks a motion. Source: BeyondMimic (Liao et al. 2025), as mjlab 1.6's tracking task has it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.locomotion.catalog import Push, VelocityTask, change_task, read_section, velocity_task
from ejax.envs.locomotion.clips import Clip, motion_file, read_clip
from ejax.envs.locomotion.legged_task import LeggedTask
from ejax.envs.locomotion.motion import FootTimers, observe_motion, start_timers
from ejax.envs.mujoco.engine import Engine, PhysicsState
from ejax.envs.mujoco.rotations import matrix_from_euler, matrix_from_quaternion, quaternion_from_matrix
from ejax.envs.terms.commands import check_kind
from ejax.envs.terms.legged import LeggedWorld, Numbers, Reference
from ejax.envs.terms.tracking import describe_tracking, tracking_errors
from ejax.schema.frozen import freeze
from ejax.schema.tables import tables_beside
from ejax.types import Array, Key, PyTree, Timestep

_TABLES = tables_beside(__file__)


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Places in the clip where episodes start. ``adaptive``: in B bins, of ``bin`` s or a little more, by

        p_b ∝ Σ_u decay^u·(f_{b+u} + uniform/B),  u < kernel;    f ← (1 − rate)·f + rate·(1 at the bin of a failure)

    so that bins before failures get most of the starts. Differs from mjlab 1.6: every row has the f of its own
    episodes, updated at their ends, not at each control step of all rows; and its kernel has one bin."""

    by: Literal["adaptive", "uniform", "first"] = "adaptive"
    bin: float = 1.0  # s
    kernel: int = 3
    decay: float = 0.8
    uniform: float = 0.1
    rate: float = 0.05
    noise: float = 1.0  # Times the changes of the reference's state that an episode starts with

    def __post_init__(self) -> None:
        for field in fields(self):
            check_kind(f"starts.{field.name}", getattr(self, field.name), field.default)
        whole = self.kernel >= 1 and self.noise >= 0.0 and self.bin > 0.0 and self.uniform > 0.0
        if self.by not in ("adaptive", "uniform", "first"):
            raise ValueError(f"starts.by must be adaptive, uniform or first, got {self.by!r}")
        if not (whole and 0.0 < self.rate <= 1.0 and 0.0 <= self.decay <= 1.0):
            text = "bin > 0, kernel >= 1, 0 <= decay <= 1, uniform > 0, 0 < rate <= 1, noise >= 0"
            raise ValueError(f"starts must have {text}; got {vars(self)}")

    def probabilities(self, failures: Array) -> Array:
        """[B]: of a start in each bin. The last bin's value counts for those beyond the end, as in the source."""
        padded = jnp.pad(failures + self.uniform / len(failures), (0, self.kernel - 1), mode="edge")
        weights = jnp.stack([self.decay**u * padded[u : u + len(failures)] for u in range(self.kernel)]).sum(axis=0)
        return weights / weights.sum()

    def after(self, failures: Array, place: Array, failed: Array) -> Array:
        """[B]: after an episode that ended in the bin ``place``."""
        return (1.0 - self.rate) * failures + self.rate * failed * jax.nn.one_hot(place, len(failures))


@struct.dataclass(kw_only=True)
class TrackingState:
    physics: PhysicsState
    """qpos: base position and quaternion (w x y z), then the joints; qvel: base linear (world) and angular (base)."""
    frame: Array  # Of the clip, which the robot should be in now, int32
    action: Array  # [A]: the last
    joint_vel: Array  # [A], rad/s: after the step before
    encoder_bias: Array  # [A], rad
    feet: FootTimers
    push_in: Array  # Control steps until the next push, int32
    episode_step: Array  # Control steps done, int32
    errors: Array  # [3 + A]: sums over the episode of ``tracking_errors``
    failures: Array  # [B]: of the row, see ``Starts``; outlasts its episodes
    seed: Array  # [2] uint32: the key of the episode's start


@dataclass(frozen=True)
class TrackingRL(LeggedTask):
    """Task of a legged robot that tracks a motion: it starts in a state of the clip, and follows it to the end.

        r = Δt·Σ weight·term        q* = q⁰ + scale·a − encoder bias

    The observation has two parts, ``policy`` with noise and ``critic`` without, which show the clip's next frame.
    Terminated: ``anchor_pos``, ``anchor_ori`` or ``ee_body_pos`` fails. Truncated: the time limit, or the clip's end.
    ``metrics/joint_error_NAME`` and the others are means over the episode so far. Evaluations start at the clip's first
    frame unless ``starts.by`` is ``uniform``.

    Differs from mjlab: a clip that ends, ends the episode; lengths are scaled by the robot's height.

    Args:
        motion: a file, .npz or .csv (``ejax.envs.locomotion.clips``), or the name of a clip that comes with ejax.
        csv_fps: frames per second of a .csv.
        robot, model, noise, encoder_bias, push, rewards, sim_steps_per_control: as VelocityRL's.
        starts: changes of ``Starts``.
    """

    motion: str = "quadruped_trot"
    csv_fps: float = 30.0
    robot: str = "quadruped"
    model: str | None = None
    max_episode_steps: int = 500
    starts: Mapping[str, Any] = FrozenDict()
    rewards: Mapping[str, Any] = FrozenDict()
    noise: Mapping[str, Any] = FrozenDict()
    encoder_bias: float | None = None
    push: Mapping[str, Any] | None = FrozenDict()
    physics: Engine = "auto"
    sim_steps_per_control: int | None = None
    functor_events: Mapping[str, Any] = FrozenDict()

    def check_fields(self) -> None:
        super().check_fields()
        try:
            _ = self.sampling, self.clip
        except TypeError as error:  # an unknown name in ``starts``
            raise ValueError(str(error)) from error

    @property
    def task(self) -> VelocityTask:
        return _changed_task(self)

    @property
    def sampling(self) -> Starts:
        return read_section(Starts, self.starts, "starts")

    @property
    def clip(self) -> Clip:
        return read_clip(motion_file(self.motion), self.legged, self.control_period, self.csv_fps)

    @property
    def num_bins(self) -> int:
        return int(len(self.clip.qpos) * self.control_period / self.sampling.bin) + 1

    @property
    def own_terms(self) -> dict[str, tuple[Numbers, ...]]:
        bodies = self.reference(jnp.zeros((), jnp.int32)).bodies
        return describe_tracking(tuple(self.legged.model.body(1 + link).name for link in bodies))

    @property
    def carries_over(self) -> bool:
        return self.sampling.by == "adaptive"

    def for_evaluation(self) -> Self:
        """Judge the whole clip."""
        return replace(self, starts={**self.starts, "by": "first"}) if self.carries_over else self

    def reference(self, frame: Array) -> Reference:
        """Look up one frame."""
        clip, legged = self.clip, self.legged
        return Reference(
            joint_pos=jnp.asarray(clip.qpos[:, list(legged.joint_qpos)])[frame],
            joint_vel=jnp.asarray(clip.qvel[:, list(legged.joint_qvel)])[frame],
            link_pos=jnp.asarray(clip.link_pos)[frame],
            link_vel=jnp.asarray(clip.link_vel)[frame],
            link_rotation=jnp.asarray(clip.link_rotation)[frame],
            link_ang_vel=jnp.asarray(clip.link_ang_vel)[frame],
            **_links_that_count(self),
        )

    def start(self, key: Key) -> TrackingState:
        robot, model, bias = self.task.robot, self.legged.model, self.task.encoder_bias
        *_, key_push, key_bias = jax.random.split(key, 7)  # the first five are ``_placed``'s
        zeros, zero = jnp.zeros(len(robot.joints)), jnp.zeros((), jnp.int32)
        state = TrackingState(
            physics=PhysicsState(qpos=jnp.zeros(model.nq), qvel=jnp.zeros(model.nv)),
            frame=zero,
            action=zeros,
            joint_vel=zeros,
            encoder_bias=jax.random.uniform(key_bias, zeros.shape, minval=-bias, maxval=bias),
            feet=start_timers(len(robot.feet)),
            push_in=self.draw_push_time(key_push),
            episode_step=zero,
            errors=jnp.zeros(3 + len(zeros)),
            failures=jnp.zeros(self.num_bins),
            seed=jax.random.key_data(key),
        )
        return self._placed(state)

    def persist(self, ended: TrackingState, started: TrackingState, obs: PyTree) -> tuple[TrackingState, PyTree]:
        """Draw the start that ``reset`` drew without failures again, with those of the row."""
        if not self.carries_over:
            return started, obs
        state = self._placed(replace(started, failures=ended.failures))
        world = self.observe_noisy(self.world(state), jax.random.wrap_key_data(state.seed))
        return world.state, world.obs

    def step(self, state: TrackingState, action: Array, key: Key) -> tuple[TrackingState, Timestep]:
        state, timestep = super().step(state, action, key)
        place = state.frame * self.num_bins // len(self.clip.qpos)
        judged = self.sampling.after(state.failures, place, timestep.terminated)
        failures = jnp.where(timestep.terminated | timestep.truncated, judged, state.failures)
        return replace(state, failures=failures), timestep

    def update(self, key: Key, world: LeggedWorld, before: LeggedWorld) -> LeggedWorld:
        """Push the robot if it is time, and go on to the clip's next frame."""
        state = self.push_if_due(world.state, key)
        return replace(world, state=replace(state, frame=self._next(state.frame)))

    def observe_noisy(self, world: LeggedWorld, key: Key) -> LeggedWorld:
        state, robot = world.state, self.task.robot
        motion = observe_motion(robot, self.legged, state.physics)
        none = jnp.zeros(len(robot.feet))
        seen = self.see(
            world,
            motion,
            command=jnp.zeros(3),
            base_height=motion.position[2],
            scan=jnp.zeros(0),
            foot_height=motion.foot_pos[:, 2],
            swing_peak=none,
            reference=self.reference(state.frame),
        )
        # a policy sees the frame that it should reach; rewards compare with the one that it should have reached
        shown = replace(world, legged=replace(seen, reference=self.reference(self._next(state.frame))))
        obs, world = self.show(shown, key), replace(world, legged=seen)
        errors = state.errors + (jnp.zeros_like(state.errors) if world.before is None else tracking_errors(world))
        return replace(world, state=replace(state, joint_vel=motion.joint_vel, errors=errors), obs=obs)

    def truncates(self, world: LeggedWorld) -> Array:
        return jnp.asarray(world.state.frame >= len(self.clip.qpos) - 1)

    def metrics(self, world: LeggedWorld) -> dict[str, Array]:
        state, joints = world.state, self.task.robot.joints
        means = state.errors / jnp.maximum(state.episode_step, 1)
        names = ("anchor_position_error", "anchor_orientation_error", "body_position_error")
        probabilities = self.sampling.probabilities(state.failures)
        return {
            **dict(zip(names, means[:3], strict=True)),
            "joint_error": means[3:].mean(),
            **{f"joint_error_{joint}": means[3 + i] for i, joint in enumerate(joints)},
            "hardest_start": probabilities.max(),
        }

    def _next(self, frame: Array) -> Array:
        return jnp.minimum(frame + 1, len(self.clip.qpos) - 1)

    def _placed(self, state: TrackingState) -> TrackingState:
        """Draw a frame by the row's failures, and put the robot into it, with small changes."""
        starts, clip, size, ranges = self.sampling, self.clip, len(self.clip.qpos), _TABLES["start"]
        keys = jax.random.split(jax.random.wrap_key_data(state.seed), 7)
        place = jax.random.choice(keys[0], self.num_bins, p=starts.probabilities(state.failures))
        inside = jax.random.uniform(keys[1]) * (starts.by != "first")
        at = (place + inside) / self.num_bins if starts.by == "adaptive" else inside
        frame = jnp.minimum((at * (size - 1)).astype(jnp.int32), size - 2)  # an episode has a step at least

        def change(name: str, key: Key, size: int = 6) -> Array:
            most = starts.noise * jnp.asarray(ranges[name])
            return jax.random.uniform(key, (size,), minval=-most, maxval=most)

        pose, joints = change("place", keys[2]), jnp.array(self.legged.joint_qpos)
        qpos, qvel = jnp.asarray(clip.qpos)[frame], jnp.asarray(clip.qvel)[frame]
        turn = matrix_from_euler(pose[3:]) @ matrix_from_quaternion(qpos[3:7])
        low, high = jnp.asarray([self.legged.model.joint(name).range for name in self.task.robot.joints], jnp.float32).T
        bent = jnp.clip(qpos[joints] + change("joints", keys[4], len(joints)), low, high)
        qpos = qpos.at[:3].add(pose[:3]).at[3:7].set(quaternion_from_matrix(turn)).at[joints].set(bent)
        qvel = qvel.at[:6].add(change("velocity", keys[3]))
        physics = replace(state.physics, qpos=qpos, qvel=qvel)
        return replace(state, physics=physics, frame=frame, joint_vel=qvel[jnp.array(self.legged.joint_qvel)])


@functools.lru_cache(maxsize=32)
def _changed_task(env: TrackingRL) -> VelocityTask:
    own = velocity_task(env.robot)
    scale = own.robot.height / _TABLES["height"]

    def scaled(part: str, name: str, x: float) -> float:
        return x * scale if name in _TABLES["lengths"] and part != "weight" else x

    rewards, ends = (
        {name: {part: scaled(part, name, x) for part, x in spec.items()} for name, spec in _TABLES[kind].items()}
        for kind in ("rewards", "terminations")
    )
    task = replace(
        own,
        actor=tuple(_TABLES["actor"]),
        critic=tuple(_TABLES["critic"]),
        noise=freeze({name: scaled("noise", name, x) for name, x in _TABLES["noise"].items()}),
        rewards=freeze(rewards),
        terminations=freeze(ends),
        push=Push(**freeze(_TABLES["push"])),
    )
    names = ("rewards", "noise", "push", "encoder_bias", "model")
    return change_task(task, command={}, curriculum=None, **{name: getattr(env, name) for name in names})


@functools.lru_cache(maxsize=32)
def _links_that_count(env: TrackingRL) -> Mapping[str, Any]:
    """Name the robot's own fields of ``Reference``."""
    robot, model = env.task.robot, env.legged.model
    links = {model.body(i).name: i - 1 for i in range(1, model.nbody)}
    points = {foot.body: foot.offset for foot in robot.feet}
    table = _TABLES.get(env.robot, {})
    ends = [(links[name], points.get(name, (0.0, 0.0, 0.0))) for name in table.get("ends", points)]
    bodies = tuple(links[name] for name in table.get("bodies", links))
    return {"anchor": links[robot.upright], "bodies": bodies, "ends": tuple(ends)}
