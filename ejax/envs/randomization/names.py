"""The names of everything that ``trainer.events`` may ask for; without MuJoCo, which takes long to import."""

from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

CURRICULUM = "curriculum"
PHYSICS_EVENTS = (
    *(f"randomize_rigid_object_{what}" for what in ("mass", "center_of_mass", "inertia", "scale", "friction")),
    *("randomize_articulation_mass", "randomize_joint_parameters", "randomize_drive_gains", "randomize_gravity"),
    *("push_rigid_object_by_setting_velocity", "push_joints_by_setting_velocity"),
)
_SENSING = ("add_observation_noise", "add_action_noise", "delay_observation", "delay_action")
_MODES = {
    **{
        name: ("interval",) if name.startswith("push_") else ("reset", "startup", "interval") for name in PHYSICS_EVENTS
    },
    **dict.fromkeys(_SENSING, ("reset", "startup")),
    CURRICULUM: ("reset",),
}
KINDS = tuple(_MODES)
"""Every event, in the order of docs/randomization.md."""
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
    """List what ``mode`` may be, the default first."""
    return _MODES.get(func, _MODES[PHYSICS_EVENTS[0]])  # an unknown one is refused for its name, not for its mode


def split_events(entries: Mapping[str, Any]) -> tuple[dict[str, Any], FrozenDict]:
    """Separate the entries of these names from the others."""
    own = {name: entry for name, entry in entries.items() if entry["func"] in KINDS or entry["func"] in REFUSED}
    return own, FrozenDict({name: entry for name, entry in entries.items() if name not in own})
