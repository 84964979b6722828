"""A UR10 with a two-finger gripper sets one of two cubes down in one of three zones, as an instruction says."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ejax.envs.description import EnvDescription, Feature
from ejax.envs.mujoco.engine import PhysicsState
from ejax.envs.task.world import World, marker_name
from ejax.envs.tasks.grasp_task import (
    HALF_EDGE,
    HOME,
    ROBOT_NUMBERS,
    GraspTask,
    describe_numbers,
    draw_place,
    draw_turn,
    horizontal_distance,
    is_set_down,
    make_grasp_model,
)
from ejax.envs.tasks.place_instructions import BYTES, COLOURS, LENGTH, ZONES, Split, Wordings, pairs, table, wordings
from ejax.numerics.text import as_text
from ejax.types import Array, Key

CUBES = ("cube_1", "cube_2")
SCENE = (
    *(f"{name} {axis}" for name in (*CUBES, *(f"zone {zone}" for zone in ZONES)) for axis in "xyz"),
    *(f"{name} colour index" for name in CUBES),
    *(f"{name} index" for name in ("target cube", "target zone")),
    *(f"{name} was lifted" for name in CUBES),
)
"""The name of each number of the privileged part of the observation."""
GOAL = tuple(f"target {name} {axis}" for name in ("cube", "zone") for axis in "xyz")
"""The same of the part that pictures and instruction give together."""
CUBE_AREA: tuple[tuple[float, float], tuple[float, float]] = ((-0.57, -0.15), (0.11, 0.25))
"""Centre and ± bound of the cubes' places at reset, m."""
CUBE_DISTANCE = 0.12
"""m between the cubes at reset, at least: open fingers reach 0.062 m to either side, and a turned cube 0.035 m."""
ZONE_CENTRES: tuple[tuple[float, float], ...] = ((-0.82, -0.42), (-0.82, -0.15), (-0.82, 0.12))
"""m, of the zones in the order of ``ZONES``; beyond the cubes' area as the robot sees it."""

_NUM_TRIES = 8
_ZONE_RGBA = "0.30 0.32 0.35 1"


@struct.dataclass
class Question:
    """Other instructions that one could give in the same picture: one for each cube."""

    first: Array  # int32: the cube that is asked for, until it is lifted
    zones: Array  # [2] int32
    instructions: Array  # [2, 64] uint8


@struct.dataclass(kw_only=True)
class InstructedPlaceState:
    """One episode."""

    physics: PhysicsState  # qpos [22]: 6 joints, 2 fingers, position and quaternion of each cube; qvel [20]
    zones: Array  # [3, 3], m: where a cube's centre is that stands in the middle of a zone
    colours: Array  # [2] int32: of the cubes, as indices into ``COLOURS``
    target_cube: Array  # int32
    target_zone: Array  # int32
    instruction: Array  # [64] uint8
    was_lifted: Array  # [2] bool: that cube has been 0.05 m above the floor in this episode
    episode_step: Array  # Control steps done, int32
    other: Question | None = None

    @property
    def cubes(self) -> Array:
        """[2, 3], m: the cubes' centres."""
        return self.physics.qpos[8:].reshape(2, 7)[:, :3]


@dataclass(frozen=True)
class InstructedPlaceRL(GraspTask):
    """Task of a UR10 with a gripper that places the cube which a sentence names in the zone which it names.

    Reward and action: see ``GraspTask``, for the cube and the zone that are meant. Φ's weights are 0 unless given.

    Two cubes of two of four colours, three grey zones: one picture, six things to do. Observation:

        state        [11] float32   the robot's own: joint angles, travel of the fingers, tool; rad, m
        instruction  [64] uint8     UTF-8, zeros after it: "put the red cube in the middle zone"
        scene        [21] float32   see ``SCENE``: for the expert and for a critic; a policy does not get it
        goal         [6] float32    see ``GOAL``: for a policy to predict where it is cloned (``model_config.predicts``)
        other_instruction, other_goal   with ``ask_others``: the same for another instruction (``model_config.asks``)

    Success: the cube that is meant, lifted once, stands within success_threshold (m, horizontally) of the zone that is
    meant, at rest and released. ``info["metrics"]``: ``distance_to_goal`` (m), ``wrong_cube_lifted``, and
    ``wrong_zone``, a cube that was lifted and now stands in a zone that was not meant.

    Args:
        wordings, pairs: the sentences, and the pairs of colour and zone, that are drawn: see ``place_instructions``.
        instruction: ``right``, or for control ``shuffled``: it names one of the two cubes and one of the three zones
            regardless of what is meant, and is right in one of six episodes.
        ask_others: observations also have an instruction drawn regardless of what is meant, of the same wordings and
            pairs, for a cube that has not been lifted.
        zone_offset, cube_turn: ± m in x and y, and ± rad about the vertical, at reset, uniform.
    """

    wordings: Wordings = "train"
    pairs: Split = "train"
    instruction: Literal["right", "shuffled"] = "right"
    episode_length: int = 80
    zone_offset: float = 0.02
    ask_others: bool = False

    def check_fields(self) -> None:
        super().check_fields()
        if not 0.0 <= self.zone_offset <= 0.04:
            raise ValueError(f"zone_offset must be in [0, 0.04] m, got {self.zone_offset}")

    @property
    def asset(self) -> str:
        return make_grasp_model(CUBES, ZONES, _ZONE_RGBA)

    @property
    def instructions(self) -> tuple[str, ...]:
        """Every text of training, sorted, also where others are drawn here: the words that a policy knows."""
        texts = (BYTES[wording, colour, zone] for wording in wordings("train") for colour, zone in pairs("train"))
        return tuple(sorted(as_text(data) for data in texts))

    @property
    def text(self) -> dict[str, int]:
        return dict.fromkeys(("instruction", *(("other_instruction",) if self.ask_others else ())), LENGTH)

    @property
    def parts(self) -> dict[str, tuple[Feature, ...]]:
        parts = {"goal": GOAL, "scene": SCENE, "state": ROBOT_NUMBERS}
        if self.ask_others:
            parts["other_goal"] = GOAL
        return {name: describe_numbers(each) for name, each in parts.items()}

    @property
    def description(self) -> EnvDescription:
        return replace(super().description, instructions=self.instructions)

    def start(self, key: Key) -> InstructedPlaceState:
        key_cubes, key_turns, key_zones, key_task = jax.random.split(key, 4)
        turns = [draw_turn(each, self.cube_turn) for each in jax.random.split(key_turns)]
        poses = zip(_draw_cubes(key_cubes), turns, strict=True)
        bound = (self.zone_offset, self.zone_offset)
        centres = zip(jax.random.split(key_zones, len(ZONES)), ZONE_CENTRES, strict=True)
        return InstructedPlaceState(
            physics=self.resting(HOME, *(part for pose in poses for part in pose)),
            zones=jnp.stack([draw_place(each, centre, bound) for each, centre in centres]),
            **self._draw_task(key_task),
            was_lifted=jnp.zeros(2, bool),
            episode_step=jnp.zeros((), jnp.int32),
        )

    def succeeds(self, world: World) -> Array:
        state = world.state
        return self._is_placed(state)[state.target_cube, state.target_zone]

    def distance(self, state: InstructedPlaceState) -> Array:
        # of all cubes and zones, and then one: the other order moves last bits elsewhere in the step
        return _distances(state)[state.target_cube, state.target_zone]

    def target(self, state: InstructedPlaceState) -> tuple[Array, Array, Array]:
        cube = state.target_cube
        return state.cubes[cube], state.zones[state.target_zone], state.was_lifted[cube]

    def metrics(self, world: World) -> dict[str, Array]:
        state = world.state
        meant = jnp.arange(len(ZONES)) == state.target_zone
        return {
            **super().metrics(world),
            "wrong_cube_lifted": state.was_lifted[1 - state.target_cube].astype(jnp.float32),
            "wrong_zone": (self._is_placed(state) & ~meant[None]).any().astype(jnp.float32),
        }

    def markers(self, state: InstructedPlaceState) -> dict[str, Array]:
        return {marker_name(zone): state.zones[i] for i, zone in enumerate(ZONES)}

    def colours(self, state: InstructedPlaceState) -> dict[str, Array]:
        colours = jnp.asarray(list(COLOURS.values()))[state.colours]
        return {name: colours[i] for i, name in enumerate(CUBES)}

    def caption(self, state: InstructedPlaceState) -> str:
        return as_text(state.instruction)

    def ending(self, state: InstructedPlaceState) -> str:
        """Name what the policy went for: the cubes that it lifted, and the zones in which they stand now."""
        placed, lifted = self._is_placed(state), np.flatnonzero(state.was_lifted)
        ends = {cube: next((f"{ZONES[z]} zone" for z in np.flatnonzero(placed[cube])), "no zone") for cube in lifted}
        colours = {cube: list(COLOURS)[state.colours[cube]] for cube in lifted}
        return ", ".join(f"{colours[cube]} cube: {ends[cube]}" for cube in lifted) or "nothing lifted"

    def _draw_task(self, key: Key) -> dict[str, Any]:
        key_pair, key_cube, key_other, key_wording, key_named = jax.random.split(key, 5)
        colour, zone = _draw_one(key_pair, jnp.asarray(pairs(self.pairs), jnp.int32))
        # an offset within 1 … 3: never the same colour twice
        other = (colour + jax.random.randint(key_other, (), 1, len(COLOURS))) % len(COLOURS)
        cube = jax.random.randint(key_cube, (), 0, len(CUBES))
        colours = jnp.where(jnp.arange(len(CUBES)) == cube, colour, other)
        sentences = table(self.wordings)
        wording = jax.random.randint(key_wording, (), 0, len(sentences))
        named_colour, named_zone = colour, zone
        if self.instruction == "shuffled":
            key_colour, key_zone = jax.random.split(key_named)
            named_colour, named_zone = _draw_one(key_colour, colours), jax.random.randint(key_zone, (), 0, len(ZONES))
        other = None
        if self.ask_others:
            key_first, key_asked, key_phrase = jax.random.split(jax.random.fold_in(key, 1), 3)
            allowed = np.zeros((len(COLOURS), len(ZONES)), bool)
            allowed[tuple(np.transpose(pairs(self.pairs)))] = True
            open_to = jnp.where(jnp.asarray(allowed)[colours], 0.0, -jnp.inf)  # [2, 3]
            # what is meant is drawn too: else what the arm stays away from would be the answer
            zones = jax.random.categorical(key_asked, open_to, axis=-1)
            phrases = jax.random.randint(key_phrase, (len(CUBES),), 0, len(sentences))
            first = jax.random.randint(key_first, (), 0, len(CUBES))
            other = Question(first, zones, jnp.asarray(sentences)[phrases, colours, zones])
        return {
            "other": other,
            "colours": colours,
            "target_cube": cube,
            "target_zone": zone,
            "instruction": jnp.asarray(sentences)[wording, named_colour, named_zone],
        }

    def observe(self, world: World) -> dict[str, Array]:
        state, qpos, cubes = world.state, world.qpos, world.state.cubes
        ids = jnp.stack([*state.colours, state.target_cube, state.target_zone, *state.was_lifted])
        asked = {}
        if state.other is not None:
            # not for a cube in the gripper: little of it can be seen, and the arm knows where it is
            other, first = state.other, state.other.first
            asked_for = jnp.where(state.was_lifted[first], 1 - first, first)
            goal = jnp.concatenate([cubes[asked_for], state.zones[other.zones[asked_for]]])
            asked = {"other_goal": goal, "other_instruction": other.instructions[asked_for]}
        return {
            **asked,
            "goal": jnp.concatenate([cubes[state.target_cube], state.zones[state.target_zone]]),
            "instruction": state.instruction,
            "scene": jnp.concatenate([cubes.ravel(), state.zones.ravel(), ids.astype(qpos.dtype)]),
            "state": jnp.concatenate([qpos[:8], self.tool_position(state)]),
        }

    def _is_placed(self, state: InstructedPlaceState) -> Array:
        """[2, 3] bool: the cube was lifted, and stands in that zone, at rest and released."""
        velocity = state.physics.qvel[8:].reshape(len(CUBES), 6)[:, :3]
        set_down = jax.vmap(is_set_down, (0, 0, None))(state.cubes, velocity, state.physics.qpos[6:8])
        return (state.was_lifted & set_down)[:, None] & (_distances(state) < self.success_threshold)


def _distances(state: InstructedPlaceState) -> Array:
    """[2, 3], m: from each cube to each zone, horizontally."""
    return horizontal_distance(state.cubes[:, None], state.zones[None])


def _draw_cubes(key: Key) -> Array:
    """[2, 3], m: places at least ``CUBE_DISTANCE`` apart, or (1 in 7,000) the second in a corner."""
    key_first, key_second = jax.random.split(key)
    first = draw_place(key_first, *CUBE_AREA)
    # all together and the first that fits: a loop would ask the host after each on a GPU
    tries = jax.vmap(lambda key: draw_place(key, *CUBE_AREA))(jax.random.split(key_second, _NUM_TRIES))
    centre, bound = (jnp.asarray(each) for each in CUBE_AREA)
    corner = jnp.append(jnp.where(first[:2] < centre, centre + bound, centre - bound), HALF_EDGE)
    tries = jnp.concatenate([tries, corner[None]])
    return jnp.stack([first, tries[jnp.argmax(horizontal_distance(tries, first[None]) > CUBE_DISTANCE)]])


def _draw_one(key: Key, table: Array) -> Array:
    return table[jax.random.randint(key, (), 0, len(table))]
