"""A legged robot follows velocity commands on flat or rough ground. Source: EmbodiChain 0.3.2's velocity tasks."""

import functools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import FrozenDict

from ejax.envs.locomotion.catalog import VelocityTask, change_task, read_section, velocity_task
from ejax.envs.locomotion.legged_task import LeggedTask
from ejax.envs.locomotion.mirror import Mirror, make_mirror
from ejax.envs.locomotion.motion import FootTimers, heading, no_contacts, observe_motion, start_timers
from ejax.envs.locomotion.terrain import Terrain, height_below
from ejax.envs.mujoco.engine import Engine, PhysicsState
from ejax.envs.task.terms import Outcome, total
from ejax.envs.task.world import World
from ejax.envs.terms.commands import Command
from ejax.envs.terms.curricula import Part, Progress
from ejax.envs.terms.legged import LeggedWorld
from ejax.types import Array, Key, PyTree, Timestep

_SPOT = 0x5907  # folded into the key of an episode's start, for what tiles draw


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
    progress: PyTree = ()  # ``Progress`` with a curriculum or on tiles, which outlasts the episode


@dataclass(frozen=True)
class VelocityRL(LeggedTask):
    """Task of a legged robot that follows a commanded velocity.

        r = Δt·Σ weight·term        q* = q⁰ + scale·clip(a, ±1) − encoder bias

    The drives pull to q* for one control step; then a push comes, if one is due, and the next command. The observation
    has two parts, ``policy`` with noise and ``critic`` without, with contacts too. Terminated:
    ``VelocityTask.terminations``. Truncated: the time limit, or a field's edge. Success, on tiles alone: at the end of
    the episode the robot has crossed its tile, without a fall.

    Numbers that a curriculum changes are those of the stage after the control step: its command, push and rewards.

    Differs from EmbodiChain: rewards are for the command that was acted on, for Go1 as for G1; the encoders' bias is
    drawn for each episode; sensors of contact lag one physics step.

    Args:
        robot: ``quadruped`` (ours), or one whose links are a package's file or yours, see docs/locomotion.md.
        model: path of an MJCF or URDF with the robot's links. None: the one that is known.
        command, push, terrain: changes of ``CommandRanges``, ``Push`` (None: no pushes) and ``Terrain``.
        rewards: changes of the task's rewards: term -> {weight, parameter: …}; weight 0 takes a term out.
        curriculum: name -> {of, by, stages}, see ``ejax.envs.terms.curricula``; null: not this one of the task's. Those
            of numbers that ``command``, ``push`` or ``rewards`` give are out. None: no curriculum.
        noise: changes of the noise on observations: term -> half its width.
        encoder_bias: rad; None: the task's.
        sim_steps_per_control: physics steps, of the task's length. None: as many as make 0.02 s.
    """

    clips_actions = True
    robot: str = "quadruped"
    model: str | None = None
    max_episode_steps: int = 1000
    command: Mapping[str, Any] = FrozenDict()
    rewards: Mapping[str, Any] = FrozenDict()
    curriculum: Mapping[str, Any] | None = FrozenDict()
    noise: Mapping[str, Any] = FrozenDict()
    encoder_bias: float | None = None
    push: Mapping[str, Any] | None = FrozenDict()
    terrain: Mapping[str, Any] = FrozenDict()
    physics: Engine = "auto"
    sim_steps_per_control: int | None = None
    functor_events: Mapping[str, Any] = FrozenDict()

    @property
    def task(self) -> VelocityTask:
        return _changed_task(self)

    @property
    def ground(self) -> Terrain:
        return read_section(Terrain, self.terrain, "terrain")

    @property
    def mirror(self) -> Mirror | None:
        """The robot on the other side. None: its sides differ, or an observation has no mirror image that is known."""
        with suppress(ValueError):
            return make_mirror(self.task, self.legged.model, self.ground.scanned.tolist())
        return None

    def for_evaluation(self) -> Self:
        """Judge by the last stage of each curriculum at any time, and on all levels of tiles that rows can reach: a
        best checkpoint is the best at the whole task."""
        ground = self.ground
        given: dict[str, Any] = {"command": self.command, "rewards": self.rewards, "push": self.push}
        for each in self.task.curriculum.values():
            last: dict[str, Any] = {name: x for name, x in each.stages[-1].items() if name != "step"}
            if each.of == "rewards":
                last = {name: {**self.rewards.get(name, {}), "weight": weight} for name, weight in last.items()}
            given[each.of] = {**(given[each.of] or {}), **last}
        if ground.kind == "tiles" and ground.promote:
            given["terrain"] = {**self.terrain, "level": (0, ground.levels - 1), "promote": False}
        return replace(self, curriculum=None, **given) if self.carries_over else self

    def start(self, key: Key) -> VelocityState:
        task, robot, bias = self.task, self.task.robot, self.task.encoder_bias
        key_place, key_command, key_push, key_bias = jax.random.split(key, 4)
        # folded, not split: on other ground all is drawn as without tiles
        spot = self.ground.first_spot(jax.random.fold_in(key, _SPOT)) if self.ground.kind == "tiles" else ()
        progress = Progress.begin(task.curriculum, key, spot) if self.carries_over else ()
        num_joints, num_feet = len(robot.joints), len(robot.feet)
        return VelocityState(
            physics=self._start_physics(key_place, spot),
            command=task.command.draw(key_command, self.control_period, self._now("command", progress)),
            action=jnp.zeros(num_joints),
            joint_vel=jnp.zeros(num_joints),
            encoder_bias=jax.random.uniform(key_bias, (num_joints,), minval=-bias, maxval=bias),
            feet=start_timers(num_feet),
            swing_peak=jnp.zeros(num_feet),
            push_in=self.draw_push_time(key_push, self._now("push", progress)),
            episode_step=jnp.zeros((), jnp.int32),
            progress=progress,
        )

    @property
    def carries_over(self) -> bool:
        """Return whether anything outlasts an episode."""
        return bool(self.task.curriculum) or self.ground.kind == "tiles"

    def persist(self, ended: VelocityState, started: VelocityState, obs: PyTree) -> tuple[VelocityState, PyTree]:
        """Carry over how far the row has come; what ``reset`` drew for the first stage, draw again for this one."""
        if not self.carries_over:
            return started, obs
        progress: Progress = replace(ended.progress, error=started.progress.error, seed=started.progress.seed)
        key = jax.random.wrap_key_data(progress.seed)
        _, key_command, key_push, _ = jax.random.split(key, 4)  # as ``start`` does
        command = self.task.command.draw(key_command, self.control_period, self._now("command", progress))
        push_in = self.draw_push_time(key_push, self._now("push", progress))
        if progress.spot:
            level, column = ended.progress.spot
            commanded = jnp.linalg.norm(ended.command.velocity[:2]) * self.max_episode_steps * self.control_period
            key_level = jax.random.fold_in(key, _SPOT)
            level = self.ground.next_level(level, self._distance(ended), commanded, key_level)
            progress = replace(progress, spot=(level, column))
            moved = self._platform(progress.spot) - self._platform(started.progress.spot)
            qpos = started.physics.qpos.at[:3].add(moved)
            started = replace(started, physics=replace(started.physics, qpos=qpos))
        state = replace(started, command=command, push_in=push_in, progress=progress)
        world = self.observe_noisy(self.world(state), key)
        return world.state, world.obs

    def step(self, state: VelocityState, action: Array, key: Key) -> tuple[VelocityState, Timestep]:
        state, timestep = super().step(state, action, key)
        if not self.carries_over:
            return state, timestep
        curriculum, spot = self.task.curriculum, state.progress.spot
        metrics = timestep.info["metrics"]
        ended, error = timestep.terminated | timestep.truncated, metrics["linear_velocity_error"]
        progress = state.progress.judge(curriculum, error, ended, timestep.terminated, state.episode_step)
        stages = {f"curriculum_{name}": stage.astype(jnp.float32) for name, stage in progress.stage.items()}
        info, place = dict(timestep.info), {}
        if spot:
            level, column = (x.astype(jnp.float32) for x in spot)
            place = {"terrain_level": level, "terrain_column": column}
            info["success"] = self.ground.crosses(self._distance(state)) & ~timestep.terminated
        info["metrics"] = {**metrics, **stages, **place}
        return replace(state, progress=progress), replace(timestep, info=info)

    def update(self, key: Key, world: LeggedWorld, before: LeggedWorld) -> LeggedWorld:
        """Push the robot if it is time, and draw the next command if it is."""
        key_push, key_command = jax.random.split(key)
        state = world.state
        if self.carries_over:
            state = replace(state, progress=state.progress.count(self.task.curriculum))
        state = self.push_if_due(state, key_push, self._now("push", state.progress))
        now = self._now("command", state.progress)
        command = self.task.command.after(state.command, key_command, self.control_period, now)
        return replace(world, state=replace(state, command=command))

    def observe_noisy(self, world: LeggedWorld, key: Key) -> LeggedWorld:
        task, robot, state = self.task, self.task.robot, world.state
        motion = observe_motion(robot, self.legged, state.physics)
        command = task.command.steer(state.command, heading(motion), self._now("command", state.progress))
        contacts = no_contacts(robot) if world.contacts is None else world.contacts
        height = motion.foot_pos[:, 2] - height_below(self.ground, motion.foot_pos)
        turn = heading(motion)
        axes = jnp.array([[jnp.cos(turn), jnp.sin(turn)], [-jnp.sin(turn), jnp.cos(turn)]])
        scanned = motion.position[None, :2] + jnp.asarray(self.ground.scanned, jnp.float32) @ axes
        scan = motion.position[2] - robot.height - height_below(self.ground, scanned)
        # the peak is kept until its landing has been paid for, then starts again
        peak = jnp.where(contacts.found, state.swing_peak, jnp.maximum(state.swing_peak, height))
        # at an episode's start there is nothing before
        before = state if world.before is None else world.before.state
        seen = self.see(
            world,
            motion,
            command=before.command.velocity,
            base_height=motion.position[2] - height_below(self.ground, motion.position),
            scan=jnp.clip(scan, -1.0, 1.0),
            foot_height=height,
            swing_peak=peak,
        )
        # a policy sees the next command; rewards pay for the one that it acted on
        shown = replace(world, legged=replace(seen, command=command.velocity))
        obs = self.show(shown, key)
        swing_peak = jnp.where(contacts.landed, 0.0, peak)
        state = replace(state, command=command, joint_vel=motion.joint_vel, swing_peak=swing_peak)
        return replace(world, state=state, obs=obs, legged=seen)

    def total(self, world: World, outcome: Outcome) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        now = self._now("rewards", world.state.progress)
        weights = {name: self.control_period * weight for name, weight in now.items()}
        return total(self.of("rewards"), world, weights=weights, start=outcome.reward)

    def truncates(self, world: LeggedWorld) -> Array | None:
        if self.ground.kind == "flat":
            return None
        # beyond the field there is no ground to walk on
        return jnp.any(jnp.abs(world.legged.motion.position[:2]) > jnp.asarray(self.ground.size))

    def metrics(self, world: LeggedWorld) -> dict[str, Array]:
        legged = world.legged
        error = legged.command - jnp.append(legged.motion.lin_vel_b[:2], legged.motion.ang_vel_b[2])
        return {
            "linear_velocity_error": jnp.linalg.norm(error[:2]),
            "yaw_rate_error": jnp.abs(error[2]),
            "base_height": legged.base_height,
        }

    def caption(self, state: VelocityState) -> str:
        forward, left, turn = (float(x) for x in state.command.velocity)
        return f"command: {forward:+.1f} m/s forward, {left:+.1f} m/s left, {turn:+.1f} rad/s"

    def _platform(self, spot: tuple[Array, Array]) -> Array:
        """[3], m: the middle of a tile, where episodes start."""
        origin = self.ground.origin(*spot)
        return jnp.append(origin, height_below(self.ground, origin))

    def _distance(self, state: VelocityState) -> Array:
        """Return how far the robot is from the middle of its tile, m."""
        return jnp.linalg.norm(state.physics.qpos[:2] - self.ground.origin(*state.progress.spot))

    def _start_physics(self, key: Key, spot: PyTree) -> PhysicsState:
        task, robot, ground = self.task, self.task.robot, self.ground
        key_xy, key_z, key_yaw = jax.random.split(key, 3)
        # spread over half the field, so that rows meet different ground and stay clear of its edge
        rough = ground.kind == "rough"
        spread = ground.half_size / 2.0 if rough else task.spread
        xy = jax.random.uniform(key_xy, (2,), minval=-spread, maxval=spread)
        drop = jax.random.uniform(key_z, (), minval=task.drop[0], maxval=task.drop[1])
        yaw = jax.random.uniform(key_yaw, (), minval=-task.turn, maxval=task.turn)
        z = robot.height + drop + (ground.height if rough else 0.0)  # clear of the highest corner
        place = jnp.append(xy, z) + (self._platform(spot) if spot else jnp.zeros(3))
        model, places = self.legged.model, jnp.array(self.legged.joint_qpos) - 7
        joints = jnp.zeros(model.nq - 7).at[places].set(jnp.array(robot.home))
        turn = jnp.stack([jnp.cos(yaw / 2.0), jnp.zeros(()), jnp.zeros(()), jnp.sin(yaw / 2.0)])
        return PhysicsState(qpos=jnp.concatenate([place, turn, joints]), qvel=jnp.zeros(model.nv))

    def _now(self, part: Part, progress: PyTree) -> Mapping[str, Array]:
        """Numbers that a curriculum puts in the place of the task's."""
        curriculum = self.task.curriculum
        return progress.numbers(curriculum, part, self.task.numbers(part)) if curriculum else {}


@functools.lru_cache(maxsize=32)
def _changed_task(env: VelocityRL) -> VelocityTask:
    task = velocity_task(env.robot)
    if env.ground.scan is not None:
        seen, noise = ("height_scan",), {"height_scan": 0.1, **task.noise}  # m, legged_gym's and Isaac Lab's
        task = replace(task, actor=task.actor + seen, critic=task.critic + seen, noise=FrozenDict(noise))
    names = ("command", "rewards", "noise", "push", "curriculum", "encoder_bias", "model")
    return change_task(task, **{name: getattr(env, name) for name in names})
