"""The base of the tasks of legged robots: model, drives, pushes, and the state that terms are computed from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from ejax.envs.description import Feature
from ejax.envs.locomotion.catalog import AXES, Push, VelocityTask
from ejax.envs.locomotion.model import LeggedModel, make_legged_model
from ejax.envs.locomotion.motion import drive_torque, follow_contacts, no_contacts
from ejax.envs.locomotion.robots import FILE, robot_file
from ejax.envs.locomotion.terrain import Terrain
from ejax.envs.mujoco.rotations import matrix_from_quaternion
from ejax.envs.task.terms import Term, observe_all
from ejax.envs.task.world import World
from ejax.envs.tasks.physics_task import PhysicsTask
from ejax.envs.terms.legged import LeggedState, LeggedWorld, Motion, Numbers, describe_terms
from ejax.types import Array, Key, PyTree


class LeggedTask(PhysicsTask):
    """A task of one robot, on one ground. Its state has ``physics``, ``action``, ``joint_vel`` and ``feet`` of the step
    before, ``encoder_bias`` and ``push_in``, as ``VelocityState``."""

    positive = ("max_episode_steps",)
    reward_field = ""  # ``rewards`` changes the robot's own task, whose terms are functors all
    robot: str
    model: str | None

    def check_fields(self) -> None:
        if not isinstance(self.model, str | None):
            raise ValueError(f"model must be the path of a file, got {self.model!r}")
        try:
            source, _ = self.task.robot.source, self.ground
            # a package's file is known to fit: it is not compiled before it is needed
            _ = self.legged if source is None or source.startswith(FILE) else robot_file(source)
        except (ModuleNotFoundError, TypeError) as error:
            raise ValueError(str(error)) from error
        super().check_fields()

    @property
    def task(self) -> VelocityTask:
        raise NotImplementedError

    @property
    def ground(self) -> Terrain:
        return Terrain()

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.task.terms(self.control_period)

    @property
    def legged(self) -> LeggedModel:
        return make_legged_model(self.task.robot, self.ground, self.task.timestep)

    @property
    def num_substeps(self) -> int:
        given = self.sim_steps_per_control
        return self.task.sim_steps_per_control if given is None else int(given)

    @property
    def control_period(self) -> float:
        return self.task.timestep * self.num_substeps

    @property
    def asset(self) -> str:
        return self.legged.xml

    @property
    def action_features(self) -> tuple[Feature, ...]:
        return tuple(Feature(f"{joint} position change / action scale", "rad") for joint in self.task.robot.joints)

    @property
    def own_terms(self) -> Mapping[str, tuple[Numbers, ...]]:
        """The numbers of observations that only this task has."""
        return {}

    @property
    def parts(self) -> dict[str, tuple[Feature, ...]]:
        task, robot, points = self.task, self.task.robot, self.ground.scanned.tolist()
        return {
            part: describe_terms(robot.joints, len(robot.feet), terms, points, self.own_terms)
            for part, terms in (("policy", task.actor), ("critic", task.critic))
        }

    def world(self, state: Any) -> LeggedWorld:
        return LeggedWorld(asset=self.asset, control_period=self.control_period, state=state, markers_of=self.markers)

    def control(self, world: World, action: Array) -> Array:
        robot = self.task.robot
        scale = jnp.asarray(robot.drives.action_scale)
        return jnp.asarray(robot.home) + scale * action - world.state.encoder_bias

    def act(self, world: LeggedWorld, action: Array) -> LeggedWorld:
        action, state = self.clip_action(action), world.state
        target = self.control(world, action)
        physics, readings = self.simulation.step_sensing(state.physics, target)
        feet, contacts = follow_contacts(state.feet, self.legged, readings, self.task.timestep)
        state = replace(state, physics=physics, action=action, feet=feet)
        return replace(world, state=state, executed=action, contacts=contacts, target=target)

    def see(self, world: LeggedWorld, motion: Motion, **own: Any) -> LeggedState:
        """Put together what terms are computed from; ``own``: the fields that only the task knows."""
        task, robot, state, model = self.task, self.task.robot, world.state, self.legged.model
        limits = np.array([model.joint(name).range for name in robot.joints])
        middle, half = limits.mean(axis=1), (limits[:, 1] - limits[:, 0]) / 2.0 * robot.soft_limit_factor
        soft_limits = np.stack([middle - half, middle + half], axis=1).astype(np.float32)
        # at an episode's start there is nothing before
        before = state if world.before is None else world.before.state
        target = motion.joint_pos if world.target is None else world.target
        return LeggedState(
            joints=robot.joints,
            home=robot.home,
            motion=motion,
            contacts=no_contacts(robot) if world.contacts is None else world.contacts,
            action=state.action,
            last_action=before.action,
            joint_acc=(motion.joint_vel - before.joint_vel) / self.control_period,
            joint_torque=drive_torque(robot, motion, target),
            air_time=state.feet.air_time,
            encoder_bias=state.encoder_bias,
            time=state.episode_step * self.control_period,
            phase_period=task.phase_period,
            soft_limits=jnp.asarray(soft_limits),
            link_masses=jnp.asarray(model.body_mass[1:]),
            **own,
        )

    def show(self, world: LeggedWorld, key: Key) -> PyTree:
        """Compute both parts of the observation, with noise in ``policy``."""
        terms = self.of("observations")
        return {
            group: observe_all([each for each in terms if each.path == (group,)], world, noise)
            for group, noise in (("policy", key), ("critic", None))
        }

    def draw_push_time(self, key: Key, now: Mapping[str, Array] = FrozenDict()) -> Array:
        """Control steps until the next push. ``now``: numbers that a curriculum puts in the place of the task's."""
        first, last = {**vars(self.task.push or Push()), **now}["interval"]
        seconds = jax.random.uniform(key, (), minval=first, maxval=last)
        return jnp.ceil(seconds / self.control_period).astype(jnp.int32)

    def push_if_due(self, state: Any, key: Key, now: Mapping[str, Array] = FrozenDict()) -> Any:
        if self.task.push is None:
            return state
        key_velocity, key_time = jax.random.split(key)
        low, high = jnp.array([{**vars(self.task.push), **now}[axis] for axis in AXES]).T
        linear, angular = jnp.split(jax.random.uniform(key_velocity, (6,), minval=low, maxval=high), 2)
        state = replace(state, push_in=state.push_in - 1)
        qpos, qvel = state.physics.qpos, state.physics.qvel
        # both are in the world's frame, in which qvel has the linear one alone
        rotation = matrix_from_quaternion(qpos[3:7] / jnp.linalg.norm(qpos[3:7]))
        physics = replace(state.physics, qvel=qvel.at[:6].add(jnp.concatenate([linear, angular @ rotation])))
        pushed = replace(state, physics=physics, push_in=self.draw_push_time(key_time, now))
        # drawn every step and selected: rows are due at different times
        return jax.tree.map(lambda new, old: jnp.where(state.push_in <= 0, new, old), pushed, state)
