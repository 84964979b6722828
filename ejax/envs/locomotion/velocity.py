"""A legged robot follows velocity commands on flat or rough ground. Source: EmbodiChain 0.3.2's velocity tasks."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict
from numpy.typing import NDArray

from ejax.envs.description import Feature
from ejax.envs.locomotion.catalog import robot_names, velocity_task
from ejax.envs.locomotion.contacts import FootTimers, follow_contacts, no_contacts, start_timers
from ejax.envs.locomotion.model import LeggedModel, make_model
from ejax.envs.locomotion.motion import drive_torque, heading, link_masses, observe_motion
from ejax.envs.locomotion.robots import FILE, robot_file
from ejax.envs.locomotion.tasks import Push, VelocityTask, change_task
from ejax.envs.locomotion.terrain import Terrain, height_below
from ejax.envs.mujoco.engine import Engine, PhysicsState
from ejax.envs.mujoco.rotations import matrix_from_quaternion
from ejax.envs.task.step import conclude
from ejax.envs.task.terms import Term, observe, weigh
from ejax.envs.task.world import World
from ejax.envs.tasks.physics_task import PhysicsTask
from ejax.envs.terms.commands import Command
from ejax.envs.terms.legged import describe_terms
from ejax.envs.terms.legged_world import Contacts, LeggedState, LeggedWorld, Motion
from ejax.numerics.finite import all_finite
from ejax.schema.frozen import freeze
from ejax.schema.plain_files import expanded
from ejax.types import Array, Key, Timestep


@struct.dataclass(kw_only=True)
class VelocityState:
    physics: PhysicsState
    """qpos: base position and quaternion (w x y z), then the joints; qvel: base linear (world) and angular (base)."""
    command: Command
    action: Array  # [A]: the last, within ±1
    joint_vel: Array  # [A], rad/s: after the step before
    encoder_bias: Array  # [A], rad
    feet: FootTimers
    swing_peak: Array  # [F], m: the greatest height since the last landing
    push_in: Array  # Control steps until the next push, int32
    episode_step: Array  # Control steps done, int32


@dataclass(frozen=True)
class VelocityRL(PhysicsTask):
    """Task of a legged robot that follows a commanded velocity.

        r = Δt·Σ weight·term        q* = q⁰ + scale·clip(a, ±1) − encoder bias

    A step: the drives pull to q* for one control step → a push, if one is due → contacts → the next command →
    observation, fall, reward. ``info["rewards"]`` are weighted and sum up to the reward. The observation has two parts,
    ``policy`` with noise and ``critic`` without, with contacts beside. Terminated: ``VelocityTask.terminations``.
    Truncated: the time limit, or a rough field's edge. There is no success.

    Differs from EmbodiChain: rewards are for the command that was acted on, for Go1 as for G1; the encoders' bias is
    drawn for each episode; sensors of contact lag one physics step; commands stay at the curriculum's first stage.

    Args:
        robot: ``quadruped`` (ours), or one whose links are a package's file or yours, see docs/locomotion.md.
        model: path of an MJCF or URDF with the robot's links. None: the one that is known.
        command, push, terrain: changes of ``CommandRanges``, ``Push`` (None: no pushes) and ``Terrain``.
        rewards: changes of the task's rewards: term -> {weight, parameter: …}; weight 0 takes a term out.
        noise: changes of the noise on observations: term -> half its width.
        encoder_bias: rad; None: the task's.
        sim_steps_per_control: physics steps, of the task's length. None: as many as make 0.02 s.
    """

    clips_actions = True
    robot: str = "quadruped"
    model: str | None = None
    max_episode_steps: int = 1000
    command: Mapping[str, Any] = FrozenDict()
    rewards: Mapping[str, Any] = FrozenDict()  # type: ignore[assignment]  # terms by name, which ``total`` computes
    noise: Mapping[str, Any] = FrozenDict()
    encoder_bias: float | None = None
    push: Mapping[str, Any] | None = FrozenDict()
    terrain: Mapping[str, Any] = FrozenDict()
    physics: Engine = "auto"
    sim_steps_per_control: int | None = None
    functor_events: Mapping[str, Any] = FrozenDict()

    def __post_init__(self) -> None:
        if self.robot not in robot_names():
            raise ValueError(f"VelocityRL: robot must be one of {', '.join(robot_names())}, got {self.robot!r}")
        if not isinstance(self.model, str | None):
            raise ValueError(f"VelocityRL: model must be the path of a file, got {self.model!r}")
        if self.max_episode_steps < 1:
            raise ValueError(f"VelocityRL: max_episode_steps must be >= 1, got {self.max_episode_steps}")
        for name in ("command", "rewards", "noise", "push", "terrain"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, freeze(dict(getattr(self, name))))
        try:
            source, _ = self.task.robot.source, self.ground
            # a package's file is known to fit: it is not compiled before it is needed
            _ = self.legged if source is None or source.startswith(FILE) else robot_file(source)
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            raise ValueError(f"VelocityRL: {error}") from error
        super().__post_init__()

    @property
    def task(self) -> VelocityTask:
        return _changed_task(self)

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.task.terms(self.control_period)

    @property
    def ground(self) -> Terrain:
        return Terrain(**self.terrain)

    @property
    def legged(self) -> LeggedModel:
        return make_model(self.task.robot, self.ground, self.task.timestep)

    @property
    def num_substeps(self) -> int:
        given = self.sim_steps_per_control
        return self.task.sim_steps_per_control if given is None else given

    @property
    def control_period(self) -> float:
        return self.task.timestep * self.num_substeps

    @property
    def asset(self) -> str:
        return self.legged.xml

    @property
    def parts(self) -> dict[str, tuple[Feature, ...]]:
        robot = self.task.robot
        parts = {"policy": self.task.actor, "critic": self.task.critic}
        return {name: describe_terms(robot.joints, len(robot.feet), terms) for name, terms in parts.items()}

    @property
    def acted(self) -> tuple[Feature, ...]:
        return tuple(Feature(f"{joint} position change / action scale", "rad") for joint in self.task.robot.joints)

    def reset(self, key: Key) -> tuple[VelocityState, dict[str, Array]]:
        task, robot, bias = self.task, self.task.robot, self.task.encoder_bias
        key_place, key_command, key_push, key_bias, key_noise = jax.random.split(key, 5)
        physics = self._start(key_place)
        state = VelocityState(
            physics=physics,
            command=task.command.draw(key_command, self.control_period),
            action=jnp.zeros(len(robot.joints)),
            joint_vel=jnp.zeros(len(robot.joints)),
            encoder_bias=jax.random.uniform(key_bias, (len(robot.joints),), minval=-bias, maxval=bias),
            feet=start_timers(len(robot.feet)),
            swing_peak=jnp.zeros(len(robot.feet)),
            push_in=self._draw_push_time(key_push),
            episode_step=jnp.zeros((), jnp.int32),
        )
        state = self.begin(key, self.world(state)).state
        motion = observe_motion(robot, self.legged, state.physics)
        state = replace(state, command=task.command.steer(state.command, heading(motion)))
        legged = self._legged_state(state, state, motion, no_contacts(robot), jnp.zeros(len(robot.joints)))
        return state, self._see(replace(self.world(state), legged=legged), key_noise)

    def world(self, state: VelocityState) -> LeggedWorld:
        return LeggedWorld(asset=self.asset, control_period=self.control_period, state=state, markers_of=self.markers)

    def control(self, world: World, action: Array) -> Array:
        robot = self.task.robot
        scale = jnp.asarray(robot.drives.action_scale)
        return jnp.asarray(robot.home) + scale * action - world.state.encoder_bias

    def step(self, state: VelocityState, action: Array, key: Key) -> tuple[VelocityState, Timestep]:
        """Make one control step: the parts of ``ejax.envs.task.step``, but rewards come before the next command. So
        XLA rounds as it did: in the shared order seeded trainings get other bits."""
        task, robot, before = self.task, self.task.robot, state
        if action.shape != (shape := self.action_space.shape):
            raise ValueError(f"VelocityRL.step takes an action of shape {shape}, got {action.shape}")
        key_push, key_command, key_noise = jax.random.split(key, 3)
        action = self.limited(action)
        target = self.control(self.world(state), action)
        physics, readings = self.simulation.step_sensing(state.physics, target)
        state = replace(state, physics=physics, action=action, episode_step=state.episode_step + 1)
        state = self.happen(key, self.world(self._push(state, key_push))).state
        # readings are of before the push, which acts on velocities after the physics
        feet, contacts = follow_contacts(state.feet, self.legged, readings, task.timestep)
        motion = observe_motion(robot, self.legged, state.physics)
        # the peak is kept until its landing has been paid for, then starts again
        height = motion.foot_pos[:, 2] - height_below(self.ground, motion.foot_pos)
        peak = jnp.where(contacts.found, state.swing_peak, jnp.maximum(state.swing_peak, height))
        state = replace(state, feet=feet, swing_peak=peak)
        legged = self._legged_state(state, before, motion, contacts, drive_torque(robot, motion, target))
        rewards = weigh(self.of("rewards"), replace(self.world(state), legged=legged))
        command = task.command.after(state.command, key_command, self.control_period)
        state = replace(
            state,
            command=task.command.steer(command, heading(motion)),
            joint_vel=motion.joint_vel,
            swing_peak=jnp.where(contacts.landed, 0.0, peak),
        )
        obs = self._see(replace(self.world(state), legged=legged), key_noise)
        # beyond the field there is no ground to walk on
        out_of_field = (self.ground.kind == "rough") & (jnp.abs(motion.position[:2]).max() > self.ground.half_size)
        return state, Timestep(
            obs=obs,
            reward=sum(rewards.values(), jnp.zeros(())),
            terminated=legged.terminated,
            truncated=(state.episode_step >= self.max_episode_steps) | out_of_field | ~all_finite(state),
            info={"metrics": _metrics(legged), "rewards": rewards},
        )

    def caption(self, state: VelocityState) -> str:
        forward, left, turn = (float(x) for x in state.command.velocity)
        return f"command: {forward:+.1f} m/s forward, {left:+.1f} m/s left, {turn:+.1f} rad/s"

    def _start(self, key: Key) -> PhysicsState:
        task, robot, ground = self.task, self.task.robot, self.ground
        key_xy, key_z, key_yaw = jax.random.split(key, 3)
        # spread over half the field, so that rows meet different ground and stay clear of its edge
        rough = ground.kind == "rough"
        spread = ground.half_size / 2.0 if rough else task.spread
        xy = jax.random.uniform(key_xy, (2,), minval=-spread, maxval=spread)
        drop = jax.random.uniform(key_z, (), minval=task.drop[0], maxval=task.drop[1])
        yaw = jax.random.uniform(key_yaw, (), minval=-task.turn, maxval=task.turn)
        z = robot.height + drop + (ground.height if rough else 0.0)  # clear of the highest corner
        joints = (
            jnp.zeros(self.legged.model.nq - 7).at[jnp.array(self.legged.joint_qpos) - 7].set(jnp.array(robot.home))
        )
        turn = jnp.stack([jnp.cos(yaw / 2.0), jnp.zeros(()), jnp.zeros(()), jnp.sin(yaw / 2.0)])
        return PhysicsState(qpos=jnp.concatenate([xy, z[None], turn, joints]), qvel=jnp.zeros(self.legged.model.nv))

    def _draw_push_time(self, key: Key) -> Array:
        push = self.task.push or Push()
        seconds = jax.random.uniform(key, (), minval=push.interval[0], maxval=push.interval[1])
        return jnp.ceil(seconds / self.control_period).astype(jnp.int32)

    def _push(self, state: VelocityState, key: Key) -> VelocityState:
        if self.task.push is None:
            return state
        key_velocity, key_time = jax.random.split(key)
        low, high = jnp.array(self.task.push.ranges).T
        change = jax.random.uniform(key_velocity, (6,), minval=low, maxval=high)
        state = replace(state, push_in=state.push_in - 1)
        pushed = replace(
            state, physics=_with_velocity_change(state.physics, change), push_in=self._draw_push_time(key_time)
        )
        # drawn every step and selected: rows are due at different times
        return jax.tree.map(lambda new, old: jnp.where(state.push_in <= 0, new, old), pushed, state)

    def _legged_state(
        self, state: VelocityState, before: VelocityState, motion: Motion, contacts: Contacts, torque: Array
    ) -> LeggedState:
        task = self.task
        seen = LeggedState(joints=task.robot.joints, home=task.robot.home, motion=motion, contacts=contacts)
        world = replace(self.world(state), legged=seen)
        fell = conclude(term(world) for term in self.of("terminations")).fail
        return replace(
            seen,
            terminated=jnp.zeros((), bool) if fell is None else fell,
            command=before.command.velocity,
            action=state.action,
            last_action=before.action,
            joint_acc=(motion.joint_vel - before.joint_vel) / self.control_period,
            joint_torque=torque,
            foot_height=motion.foot_pos[:, 2] - height_below(self.ground, motion.foot_pos),
            swing_peak=state.swing_peak,
            air_time=state.feet.air_time,
            encoder_bias=state.encoder_bias,
            time=state.episode_step * self.control_period,
            phase_period=task.phase_period,
            soft_limits=jnp.asarray(_soft_limits(task, self.legged)),
            link_masses=jnp.asarray(link_masses(self.legged)),
        )

    def _see(self, world: LeggedWorld, key: Key) -> dict[str, Array]:
        world = replace(world, legged=replace(world.legged, command=world.state.command.velocity))
        terms = self.of("observations")
        return {
            group: observe([each for each in terms if each.path == (group,)], world, noise)
            for group, noise in (("policy", key), ("critic", None))
        }


@functools.lru_cache(maxsize=32)
def _changed_task(env: VelocityRL) -> VelocityTask:
    own = velocity_task(env.robot)
    task = change_task(own, command=env.command, rewards=env.rewards, noise=env.noise, push=env.push)
    # an empty mapping changes nothing: a task without pushes stays without
    if env.push is not None and not env.push:
        task = replace(task, push=own.push)
    # a file of one's own has its collision shapes itself
    if env.model is not None:
        path = Path(expanded(env.model)).absolute()
        task = replace(task, robot=replace(task.robot, source=f"{FILE}{path}", shapes=()))
    return task if env.encoder_bias is None else replace(task, encoder_bias=env.encoder_bias)


def _with_velocity_change(physics: PhysicsState, change: Array) -> PhysicsState:
    """Change the base's velocity by ``change`` [6], linear and angular, both in the world's frame."""
    rotation = matrix_from_quaternion(physics.qpos[3:7] / jnp.linalg.norm(physics.qpos[3:7]))
    linear, angular = change[:3], change[3:] @ rotation
    return replace(physics, qvel=physics.qvel.at[:6].add(jnp.concatenate([linear, angular])))


def _soft_limits(task: VelocityTask, legged: LeggedModel) -> NDArray[np.float32]:
    """Compute [A, 2], rad."""
    limits = np.array([legged.model.joint(name).range for name in task.robot.joints])
    middle, half = limits.mean(axis=1), (limits[:, 1] - limits[:, 0]) / 2.0 * task.robot.soft_limit_factor
    return np.stack([middle - half, middle + half], axis=1).astype(np.float32)


def _metrics(legged: LeggedState) -> dict[str, Array]:
    error = legged.command - jnp.append(legged.motion.lin_vel_b[:2], legged.motion.ang_vel_b[2])
    return {
        "linear_velocity_error": jnp.linalg.norm(error[:2]),
        "yaw_rate_error": jnp.abs(error[2]),
        "base_height": legged.motion.position[2],
    }
