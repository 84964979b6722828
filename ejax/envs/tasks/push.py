"""A UR10 pushes a cube over the floor and leaves it at a goal."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from ejax.envs.description import Feature, features
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.task.world import World
from ejax.envs.tasks.push_cube import HOME, JOINTS, PushCubeState, PushTask, distance_to_goal
from ejax.types import Array, Key

_READY = (0.236, -1.65, 2.436, -2.357, -1.57, 0.236)  # the tool at (−0.42, −0.27, 0.08) m: low, and behind the cube
HALF_EDGE = 0.05  # of the cube, m
_BEHIND = 0.1  # m behind the cube's centre, where the tool, 0.02 m thick, is about to touch it


@dataclass(frozen=True)
class PushCube(PushTask):
    """Task of pushing the cube over the floor and leaving it at the goal.

        r = Φ(s′) − Φ(s) − w_action·‖Δq‖ − w_lifting·(h − max_lift)⁺ + w_success·[success]
        Φ = −w_reaching·‖ee − behind‖ − w_place·d

    with ee the tool centre point, d the horizontal distance from cube to goal, h the height of the cube's centre above
    its place on the floor, behind = cube − 0.1·û at push_height, û the horizontal direction from cube to goal; all in
    m. A tool that pushes higher up tips the cube. A difference of potentials leaves the best policy as it is (Ng,
    Harada and Russell 1999): there and back earns nothing, and neither does waiting anywhere.

    Success, and then terminated: d < success_threshold, the cube slower than success_max_speed (m/s), and h < max_lift.
    A cube that is thrown through the goal has not arrived. The arm starts at its home or, by ``start_range``, at a part
    (uniform, 0 to 1) of the way from there to a pose behind the cube: some episodes begin where pushing does.

    Observation [36]: that of ``PushCubeRL`` (15), the cube's quaternion (4), the velocities of the joints (6, rad/s)
    and of the cube (6: m/s, rad/s), cube − ee (3), goal − cube (2). Δq = action_scale·a with a clipped to ±1: by the
    default at most 0.04 rad, since a faster tool throws what it meets. The rest: see ``PushTask``.
    """

    obs_features = (
        *PushTask.obs_features,
        *features(("cube quaternion", "wxyz", "1")),
        *(Feature(f"{joint} velocity", "rad/s") for joint in JOINTS),
        *features(("cube velocity", "xyz", "m/s"), ("cube angular velocity", "xyz", "rad/s")),
        *features(("cube - tool", "xyz", "m"), ("goal - cube", "xy", "m")),
    )
    positive = (*PushTask.positive, "success_max_speed", "max_lift")
    weighted = ("reaching", "place", "action_penalty", "lifting_penalty", "success")
    clips_actions = True

    action_scale: float = 0.04
    success_max_speed: float = 0.1
    max_lift: float = 0.01
    push_height: float = 0.02
    reaching_weight: float = 6.0
    place_weight: float = 20.0
    action_penalty_weight: float = 0.01
    lifting_penalty_weight: float = 2.0
    success_weight: float = 10.0
    start_range: tuple[float, float] = (0.0, 1.0)

    def check_fields(self) -> None:
        super().check_fields()
        if not 0.0 <= self.start_range[0] <= self.start_range[1] <= 1.0:
            raise ValueError(f"start_range must be (low, high) with 0 <= low <= high <= 1, got {self.start_range}")

    def start(self, key: Key) -> PushCubeState:
        state, (low, high) = super().start(key), self.start_range
        part = jax.random.uniform(jax.random.fold_in(key, 1), minval=low, maxval=high)
        arm = state.physics.qpos[:6] + part * (jnp.asarray(_READY) - jnp.asarray(HOME))
        return replace(state, physics=replace(state.physics, qpos=state.physics.qpos.at[:6].set(arm)))

    def observe(self, world: World) -> Array:
        known = super().observe(world)
        tool, cube, goal = known[6:9], known[9:12], known[12:15]
        return jnp.concatenate([known, world.qpos[9:13], world.qvel, cube - tool, (goal - cube)[:2]])

    def state_of(self, obs: Array) -> PushCubeState:
        cube, goal, turn, qvel = obs[9:12], obs[12:15], obs[15:19], obs[19:31]
        qpos = jnp.concatenate([obs[:6], cube, turn / (jnp.linalg.norm(turn) + 1e-6)])
        physics = PhysicsState(qpos=qpos, qvel=qvel)
        return PushCubeState(physics=physics, goal=goal, episode_step=jnp.zeros((), jnp.int32))

    def succeeds(self, world: World) -> Array:
        return super().succeeds(world) & (_speed(world) < self.success_max_speed) & (_lift(world) < self.max_lift)

    def metrics(self, world: World) -> dict[str, Array]:
        return super().metrics(world) | {"cube_speed": _speed(world), "cube_lift": _lift(world)}

    def potential(self, world: World) -> dict[str, Array]:
        """Compute Φ's terms."""
        tool, cube, way = world.eef_pose()[:3, 3], world.qpos[6:8], world.state.goal[:2] - world.qpos[6:8]
        behind = cube - _BEHIND * way / (jnp.linalg.norm(way) + 1e-6)  # at the goal itself it would be 0/0
        reached = jnp.linalg.norm(tool - jnp.append(behind, self.push_height))
        return {"reaching": -reached, "place": -distance_to_goal(world)}

    def reward_terms(self, world: World, before: World) -> dict[str, Array]:
        former = self.potential(before)
        return {name: after - former[name] for name, after in self.potential(world).items()} | {
            "action_penalty": -jnp.linalg.norm(self.joint_step(world.executed)),
            "lifting_penalty": -jnp.maximum(0.0, _lift(world) - self.max_lift),
            "success": world.info["success"],
        }


def _speed(world: World) -> Array:
    return jnp.linalg.norm(world.qvel[6:9])  # of the cube, m/s


def _lift(world: World) -> Array:
    return world.qpos[8] - HALF_EDGE  # of the cube's centre above its place on the floor, m
