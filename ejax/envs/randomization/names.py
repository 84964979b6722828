"""The names of everything that ``trainer.events`` may ask for; without MuJoCo, which takes long to import."""

from collections.abc import Mapping
from typing import Any, Literal

from flax.core import FrozenDict

CURRICULUM = "curriculum"
KINDS: dict[str, Literal["physics", "sensing", "curriculum"]] = {
    "randomize_rigid_object_mass": "physics",
    "randomize_rigid_object_center_of_mass": "physics",
    "randomize_rigid_object_inertia": "physics",
    "randomize_rigid_object_scale": "physics",
    "randomize_rigid_object_friction": "physics",
    "randomize_articulation_mass": "physics",
    "randomize_joint_parameters": "physics",
    "randomize_drive_gains": "physics",
    "randomize_gravity": "physics",
    "push_rigid_object_by_setting_velocity": "physics",
    "push_joints_by_setting_velocity": "physics",
    "add_observation_noise": "sensing",
    "add_action_noise": "sensing",
    "delay_observation": "sensing",
    "delay_action": "sensing",
    CURRICULUM: "curriculum",
}
REFUSED: dict[str, str] = {
    "push_articulation_by_setting_velocity": (
        "robots have fixed bases here; use push_joints_by_setting_velocity or push_rigid_object_by_setting_velocity"
    ),
    "randomize_rigid_object_body_scale": "EmbodiChain gave it up; use randomize_rigid_object_scale",
    "randomize_rigid_objects_scale": "use one randomize_rigid_object_scale for each object",
    "randomize_articulation_root_pose": "robots have fixed bases here",
}
"""EmbodiChain's functors of this kind that ejax does not have, with the reason."""


def modes_of(func: str) -> tuple[str, ...]:
    """What ``mode`` may say, the default first."""
    if KINDS.get(func) == "sensing":
        return ("reset", "startup")
    if KINDS.get(func) == "curriculum":
        return ("reset",)
    return ("interval",) if func.startswith("push_") else ("reset", "startup", "interval")


def split_events(entries: Mapping[str, Any]) -> tuple[dict[str, Any], FrozenDict]:
    """Those of these names, and the others."""
    own = {name: entry for name, entry in entries.items() if entry["func"] in KINDS or entry["func"] in REFUSED}
    return own, FrozenDict({name: entry for name, entry in entries.items() if name not in own})
