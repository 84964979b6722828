"""A UR10 with a two-finger gripper sets one of two cubes down in one of three zones: which, an instruction says."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray

from ejax.envs.description import EnvDescription
from ejax.envs.mujoco.appearance import Appearance
from ejax.envs.mujoco.engine import Engine, Physics, PhysicsState, check_physics, render
from ejax.envs.task.states import marker_name
from ejax.envs.tasks.grasp_scene import HALF_EDGE, HOME, make_model
from ejax.envs.tasks.grasp_task import (
    ACTION,
    CUBE_FELL,
    LIFT,
    ROBOT,
    check_turn,
    describe_numbers,
    draw_place,
    draw_turn,
    height_of,
    horizontal_distance,
    is_set_down,
    potentials,
    tool_control,
    tool_position,
)
from ejax.envs.tasks.place_instructions import (
    BYTES,
    COLOURS,
    LENGTH,
    MEANING,
    ZONES,
    Split,
    check_split,
    pairs,
    wordings,
)
from ejax.envs.text import as_text
from ejax.numerics.finite import all_finite
from ejax.types import Array, CameraView, Key, Timestep

CUBES = ("cube_1", "cube_2")
SCENE = (
    *(f"{name} {axis}" for name in (*CUBES, *(f"zone {zone}" for zone in ZONES)) for axis in "xyz"),
    *(f"{name} colour index" for name in CUBES),
    *(f"{name} index" for name in ("target cube", "target zone")),
    *(f"{name} was lifted" for name in CUBES),
)
"""The name of each number of the privileged part of the observation."""
GOAL = tuple(f"target {name} {axis}" for name in ("cube", "zone") for axis in "xyz")
"""The same of the part that pictures and instruction tell together."""
CUBE_AREA: tuple[tuple[float, float], tuple[float, float]] = ((-0.57, -0.15), (0.11, 0.25))
"""Centre and ± bound of the cubes' places at reset, m."""
CUBE_DISTANCE = 0.12
"""m between the cubes at reset, at least: open fingers reach 0.062 m to either side, and a turned cube 0.035 m."""
ZONE_CENTRES: tuple[tuple[float, float], ...] = ((-0.82, -0.42), (-0.82, -0.15), (-0.82, 0.12))
"""m, of the zones in the order of ``ZONES``; beyond the cubes' area as the robot sees it."""

_NUM_TRIES = 8
_ZONE_RGBA = "0.30 0.32 0.35 1"


@struct.dataclass(kw_only=True)
class InstructedPlaceState:
    """One episode."""

    physics: PhysicsState
    """qpos [22]: 6 joints, 2 fingers, position and quaternion of each cube; qvel [20]."""
    zones: Array
    """[3, 3], m: where a cube's centre is that stands in the middle of a zone."""
    colours: Array
    """[2] int32: of the cubes, as indices into ``COLOURS``."""
    target_cube: Array
    """int32"""
    target_zone: Array
    """int32"""
    instruction: Array
    """[64] uint8"""
    was_lifted: Array
    """[2] bool: that cube has been 0.05 m above the floor in this episode."""
    episode_step: Array
    """Control steps done, int32."""


@dataclass(frozen=True)
class InstructedPlaceRL:
    """
        r = Φ(s') − Φ(s) − w_action·‖Δ‖ + w_success·[success]

    with the potential Φ of ``PickPlaceRL`` for the cube and the zone that are meant; its weights are 0 unless given.

    Two cubes of two of four colours, three grey zones: one picture, six things to do. Observation:

        state        [11] float32   the robot's own: joint angles, travel of the fingers, tool; rad, m
        instruction  [64] uint8     UTF-8, zeros after it: "put the red cube in the middle zone"
        scene        [21] float32   see ``SCENE``: for the expert and for a critic; a policy does not get it
        goal         [6] float32    see ``GOAL``: for a policy to predict where it is cloned (``model_config.predicts``)

    Action [4] in ±1, as in ``PickPlaceRL``. Terminated: success, which is the cube that is meant, lifted once, standing
    within success_threshold of the zone that is meant, at rest and released. Truncated: after episode_length steps, or
    when a cube fell below −0.1 m. ``info["metrics"]``: ``distance_to_goal`` (m), ``wrong_cube_lifted``, and
    ``wrong_zone``, a cube that was lifted and now stands in a zone that was not meant.

    Args:
        wordings, pairs: which sentences, and which pairs of colour and zone, are drawn:
            ``ejax.envs.tasks.place_instructions`` keeps some for testing.
        instruction: ``right``, or for control ``shuffled``: it names one of the two cubes and one of the three zones
            regardless of what is meant, and is right in one of six episodes.
        episode_length: time limit, control steps.
        physics: the engine, see ``ejax.envs.mujoco.choice``.
        success_threshold: m, horizontally.
        zone_offset: ± m in x and y, added to the zones' places at reset, uniform.
        cube_turn: ± rad about the vertical at reset, uniform.
    """

    wordings: Split = "train"
    pairs: Split = "train"
    instruction: Literal["right", "shuffled"] = "right"
    episode_length: int = 80
    action_scale: float = 0.04
    success_threshold: float = 0.03
    reaching_weight: float = 0.0
    lifting_weight: float = 0.0
    placing_weight: float = 0.0
    action_penalty_weight: float = 0.0
    success_weight: float = 1.0
    physics: Engine = "auto"
    sim_steps_per_control: int = 4
    zone_offset: float = 0.02
    cube_turn: float = 0.2

    def __post_init__(self) -> None:
        for name in ("episode_length", "action_scale", "success_threshold"):
            if not getattr(self, name) > 0:
                raise ValueError(f"InstructedPlaceRL: {name} must be > 0, got {getattr(self, name)}")
        for name in ("wordings", "pairs"):
            check_split("InstructedPlaceRL", name, getattr(self, name))
        if self.instruction not in ("right", "shuffled"):
            raise ValueError(f"InstructedPlaceRL: instruction must be 'right' or 'shuffled', got {self.instruction!r}")
        if not 0.0 <= self.zone_offset <= 0.04:
            raise ValueError(f"InstructedPlaceRL: zone_offset must be in [0, 0.04] m, got {self.zone_offset}")
        check_turn("InstructedPlaceRL", self.cube_turn)
        check_physics(self.physics, self.sim_steps_per_control)

    @property
    def max_episode_steps(self) -> int:
        return self.episode_length

    @property
    def control_period(self) -> float:
        """Duration of one step, s."""
        return 0.01 * self.sim_steps_per_control

    @property
    def instructions(self) -> tuple[str, ...]:
        """Every text of training, sorted, whatever is drawn here: the words that a policy knows."""
        said = (BYTES[wording, colour, zone] for wording in wordings("train") for colour, zone in pairs("train"))
        return tuple(sorted(as_text(data) for data in said))

    @property
    def description(self) -> EnvDescription:
        return EnvDescription(
            observation={
                "goal": describe_numbers(GOAL),
                "scene": describe_numbers(SCENE),
                "state": describe_numbers(ROBOT),
            },
            text=("instruction",),
            instructions=self.instructions,
            held_out_instructions=tuple(sorted(set(MEANING) - set(self.instructions))),
            action=ACTION,
            clips_actions=True,
            control_period=self.control_period,
            parameters=asdict(self),
        )

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        return gymnasium.spaces.Dict(
            {
                "goal": gymnasium.spaces.Box(-np.inf, np.inf, (len(GOAL),), np.float32),
                "instruction": gymnasium.spaces.Box(0, 255, (LENGTH,), np.uint8),
                "scene": gymnasium.spaces.Box(-np.inf, np.inf, (len(SCENE),), np.float32),
                "state": gymnasium.spaces.Box(-np.inf, np.inf, (len(ROBOT),), np.float32),
            }
        )

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def reset(self, key: Key) -> tuple[InstructedPlaceState, dict[str, Array]]:
        key_cubes, key_turns, key_zones, key_task = jax.random.split(key, 4)
        turns = [draw_turn(each, self.cube_turn) for each in jax.random.split(key_turns)]
        poses = zip(_draw_cubes(key_cubes), turns, strict=True)
        qpos = jnp.concatenate([jnp.asarray(HOME), *(part for pose in poses for part in pose)])
        bound = (self.zone_offset, self.zone_offset)
        centres = zip(jax.random.split(key_zones, len(ZONES)), ZONE_CENTRES, strict=True)
        state = InstructedPlaceState(
            physics=PhysicsState(qpos=qpos, qvel=jnp.zeros(20)),
            zones=jnp.stack([draw_place(each, centre, bound) for each, centre in centres]),
            **self._draw_task(key_task),
            was_lifted=jnp.zeros(2, bool),
            episode_step=jnp.zeros((), jnp.int32),
        )
        return state, self._observe(state)

    def step(self, state: InstructedPlaceState, action: Array, key: Key) -> tuple[InstructedPlaceState, Timestep]:
        del key  # physics is deterministic
        if action.shape != (4,):
            raise ValueError(f"InstructedPlaceRL.step takes an action of shape (4,), got {action.shape}")
        action = jnp.clip(action, -1.0, 1.0)
        potential_before = self._potential(state)
        control = tool_control(_model(), state.physics.qpos, action, self.action_scale)
        physics = self._physics.step(state.physics, control)
        state = replace(
            state,
            physics=physics,
            was_lifted=state.was_lifted | (height_of(_cubes(physics)) > LIFT),
            episode_step=state.episode_step + 1,
        )
        finite = all_finite(state)
        cubes, distance = _cubes(state.physics), _distances(state)
        is_placed = self._is_placed(state)
        success = is_placed[state.target_cube, state.target_zone] & finite
        meant = jnp.arange(len(ZONES)) == state.target_zone
        metrics = {
            "distance_to_goal": distance[state.target_cube, state.target_zone],
            "wrong_cube_lifted": state.was_lifted[1 - state.target_cube].astype(jnp.float32),
            "wrong_zone": (is_placed & ~meant[None]).any().astype(jnp.float32),
        }
        rewards = {name: after - potential_before[name] for name, after in self._potential(state).items()} | {
            "action_penalty": -self.action_penalty_weight * jnp.linalg.norm(self.action_scale * action[:3]),
            "success": self.success_weight * success,
        }
        fell = (cubes[:, 2] < CUBE_FELL).any()
        return state, Timestep(
            obs=self._observe(state),
            reward=sum(rewards.values(), jnp.zeros(())),
            terminated=success,
            truncated=(state.episode_step >= self.episode_length) | fell | ~finite,
            info={"success": success, "metrics": metrics, "rewards": rewards},
        )

    def appearance(self, state: InstructedPlaceState) -> Appearance:
        """What a picture of the state depends on."""
        colours = jnp.asarray(list(COLOURS.values()))[state.colours]
        return Appearance(
            asset=_model(),
            qpos=state.physics.qpos,
            mocap_pos={marker_name(zone): state.zones[i] for i, zone in enumerate(ZONES)},
            rgba={name: colours[i] for i, name in enumerate(CUBES)},
        )

    def tool_position(self, state: InstructedPlaceState) -> Array:
        """[3], m: the tool centre point."""
        return tool_position(_model(), state.physics.qpos)

    def caption(self, state: InstructedPlaceState) -> str:
        """The instruction, for videos."""
        return as_text(state.instruction)

    def render(
        self, state: InstructedPlaceState, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        """Draw one environment: [height, width, 3] RGB. See ``ejax.envs.mujoco.engine.render``."""
        look = self.appearance(state)
        return render(
            look.asset,
            look.qpos,
            width=width,
            height=height,
            mocap_pos=look.mocap_pos,
            rgba=look.rgba,
            camera=camera,
        )

    @property
    def _physics(self) -> Physics:
        return Physics(_model(), self.physics, self.sim_steps_per_control)

    def _draw_task(self, key: Key) -> dict[str, Array]:
        """Colours, what is meant, and what is said."""
        key_pair, key_cube, key_other, key_wording, key_said = jax.random.split(key, 5)
        colour, zone = _draw_one(key_pair, jnp.asarray(pairs(self.pairs), jnp.int32))
        other = (colour + jax.random.randint(key_other, (), 1, len(COLOURS))) % len(COLOURS)
        cube = jax.random.randint(key_cube, (), 0, len(CUBES))
        colours = jnp.where(jnp.arange(len(CUBES)) == cube, colour, other)
        wording = _draw_one(key_wording, jnp.asarray(wordings(self.wordings), jnp.int32))
        said_colour, said_zone = colour, zone
        if self.instruction == "shuffled":
            key_colour, key_zone = jax.random.split(key_said)
            said_colour, said_zone = _draw_one(key_colour, colours), jax.random.randint(key_zone, (), 0, len(ZONES))
        return {
            "colours": colours,
            "target_cube": cube,
            "target_zone": zone,
            "instruction": jnp.asarray(BYTES)[wording, said_colour, said_zone],
        }

    def _observe(self, state: InstructedPlaceState) -> dict[str, Array]:
        qpos = state.physics.qpos
        ids = jnp.stack([*state.colours, state.target_cube, state.target_zone, *state.was_lifted])
        cubes = _cubes(state.physics)
        places = (cubes.ravel(), state.zones.ravel())
        return {
            "goal": jnp.concatenate([cubes[state.target_cube], state.zones[state.target_zone]]),
            "instruction": state.instruction,
            "scene": jnp.concatenate([*places, ids.astype(qpos.dtype)]),
            "state": jnp.concatenate([qpos[:8], tool_position(_model(), qpos)]),
        }

    def _potential(self, state: InstructedPlaceState) -> dict[str, Array]:
        """Φ's terms, weighted."""
        target, goal = state.target_cube, state.zones[state.target_zone]
        cube, tool = _cubes(state.physics)[target], tool_position(_model(), state.physics.qpos)
        weights = (self.reaching_weight, self.lifting_weight, self.placing_weight)
        return potentials(tool, cube, goal, state.was_lifted[target], weights)

    def _is_placed(self, state: InstructedPlaceState) -> Array:
        """[2, 3] bool: the cube was lifted, and stands in that zone, at rest and released."""
        velocity = state.physics.qvel[8:].reshape(len(CUBES), 6)[:, :3]
        set_down = jax.vmap(is_set_down, (0, 0, None))(_cubes(state.physics), velocity, state.physics.qpos[6:8])
        return (state.was_lifted & set_down)[:, None] & (_distances(state) < self.success_threshold)


def _model() -> str:
    return make_model(CUBES, ZONES, _ZONE_RGBA)


def _cubes(physics: PhysicsState) -> Array:
    """[2, 3], m: the cubes' centres."""
    return physics.qpos[8:].reshape(len(CUBES), 7)[:, :3]


def _distances(state: InstructedPlaceState) -> Array:
    """[2, 3], m: from each cube to each zone, horizontally."""
    return horizontal_distance(_cubes(state.physics)[:, None], state.zones[None])


def _draw_cubes(key: Key) -> Array:
    """[2, 3], m: places at least ``CUBE_DISTANCE`` apart.

    The second is the first of some tries that is far enough from the first, and in 1 of 7,000 episodes, where none is,
    the corner of the area across from it.
    """
    key_first, key_second = jax.random.split(key)
    first = draw_place(key_first, *CUBE_AREA)
    tries = jax.vmap(lambda key: draw_place(key, *CUBE_AREA))(jax.random.split(key_second, _NUM_TRIES))
    centre, bound = (jnp.asarray(each) for each in CUBE_AREA)
    corner = jnp.append(jnp.where(first[:2] < centre, centre + bound, centre - bound), HALF_EDGE)
    tries = jnp.concatenate([tries, corner[None]])
    return jnp.stack([first, tries[jnp.argmax(horizontal_distance(tries, first[None]) > CUBE_DISTANCE)]])


def _draw_one(key: Key, table: Array) -> Array:
    """One row, each as likely."""
    return table[jax.random.randint(key, (), 0, len(table))]
