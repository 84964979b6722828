"""Files that are no train configs: gym configs by themselves, and other files of EmbodiChain's releases."""

from collections.abc import Mapping
from typing import Any

SECTIONS = ("trainer", "policy", "algorithm")
"""Sections of a train config."""

_PLANS = "EmbodiChain plans and records demonstrations by it; ejax has demonstrators of its own (docs/data.md)"
_PARTS = "ejax trains from gym configs that hold all of a scene: env beside robot, rigid_object and the others"
_OTHERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("environment", "embodiment"), f"a task put together from files, of a class that ejax does not have; {_PARTS}"),
    (("environment", "id"), f"a task put together from files, of a class that ejax does not have; {_PARTS}"),
    (("environment_id",), f"an environment without its robot, a part of a task put together from files; {_PARTS}"),
    (("embodiment_id",), f"a robot with its cameras, a part of a task put together from files; {_PARTS}"),
    (("integration_id",), f"what binds a task program to a robot and a scene. {_PLANS}"),
    (("program_id",), f"a task program. {_PLANS}"),
    (("policy_id", "preset_id"), f"how a task program is executed. {_PLANS}"),
    (("scene_randomization", "trajectory"), f"how recorded episodes are varied. {_PLANS}"),
    (("policy", "overrides", "collection"), f"how recorded episodes are varied. {_PLANS}"),
    (("profile_id", "revision"), f"how the scenes of recorded episodes are varied. {_PLANS}"),
    (("object_uid", "regions"), f"when an episode of a task program counts. {_PLANS}"),
    (("task_key", "deployments"), "a catalogue's entry: it names files and says nothing of how they run"),
    (("suite_version", "planners"), "a benchmark of motion planners, of which ejax has none"),
    (("official_task", "rewards"), "numbers that a task's class of EmbodiChain reads; ejax's VelocityRL has its own"),
    (("family", "action_dim"), "numbers that a task's class of EmbodiChain reads, which ejax does not have"),
    (("ingest", "mesh_processing"), "how EmbodiChain makes assets of meshes; ejax has no assets in files"),
    (("materials", "texture_resolution"), "a library of materials of EmbodiChain's renderer; ejax has its own colours"),
    (("accepted_episodes_per_second",), "measured rates of recording, a result and not a config"),
)
"""Keys that a kind of file has -> what it is, and why ejax reads none of it."""


def is_gym_config(data: Mapping[str, Any]) -> bool:
    """True for a file that a train config may name as ``trainer.gym_config``."""
    return "id" in data and isinstance(data.get("env"), Mapping) and not any(name in data for name in SECTIONS)


def other_file(data: Mapping[str, Any]) -> str | None:
    """Name the kind of a file that is neither a train config nor a gym config; None: it may be one, with mistakes."""
    for keys, text in _OTHERS:
        if all(key in data for key in keys) and not all(name in data for name in SECTIONS):
            return text
    if not data or {*SECTIONS, "env", "data", "compat"} & set(data):
        return None
    return f"no config: it has none of the sections {', '.join(SECTIONS)}, and is no gym config, which has id and env"
