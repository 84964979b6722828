"""``env.extensions`` of a gym config: entries that EmbodiChain makes attributes of its environment and config.

The first releases, up to 0.1.1, say there how an action acts, and how long an episode is:

    action_type (delta_qpos), action_scale (1.0), episode_length (1000)

From 0.1.2 on this is ``env.actions`` and the top level's ``max_episode_steps`` (300), and those keys are not read. So
a config without ``env.actions`` that has one of them is in the first form.

Source: ``RLEnv`` and the task classes of the tags v0.1.0 and v0.1.1; ``EmbodiedEnv`` and ``EnvCfg`` of the later ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejax.envs.manager.ignored import IGNORED
from ejax.envs.manager.tasks import Task
from ejax.schema.frozen import freeze
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section

FIRST_LIMIT, LIMIT = 1000, 300
"""Default steps of an episode: in the first form, and later."""
_FIRST_FORM = ("action_type", "action_scale", "episode_length")
_ACTION_TYPES = {
    "delta_qpos": "DeltaQposTerm",
    "qpos": "QposTerm",
    "qpos_normalized": "QposDenormalizedTerm",
    "eef_pose": "EefPoseTerm",
    "qvel": "QvelTerm",
    "qf": "QfTerm",
}
_SETTINGS_ELSEWHERE = {
    "num_envs": "trainer.num_envs",
    "sim_steps_per_control": "env.sim_steps_per_control",
    "target_control_frequency": "env.target_control_frequency",
    "control_parts": "env.control_parts",
    "active_joint_ids": "env.control_parts",
    **{name: name for name in ("robot", "sensor", "light", "background", "rigid_object", "rigid_object_group")},
    **{name: f"env.{name}" for name in ("events", "observations", "rewards", "actions", "dataset")},
    "articulation": "articulation",
    "sim_cfg": "physics_config",
    "extensions": "env.extensions",
}
"""Settings of EmbodiChain's environment that an extension of the same name replaces -> where ejax reads them."""
_OF_NOBODY = "no effect, unless a functor of yours reads it from world.extensions"


@dataclass(frozen=True)
class Extensions:
    """The parsed ``env.extensions``."""

    values: Mapping[str, Any]
    """All except those that say how an action acts."""
    actions: Section
    """``env.actions``, or its equivalent in the first form."""
    max_episode_steps: int
    first_success: bool
    """True: success is judged as in 0.1.0 and 0.1.1."""
    ignore_terminations: bool


def read_extensions(root: Section, env: Section, task: Task | None) -> Extensions:
    """Read ``env.extensions``, ``env.actions`` and ``max_episode_steps``, which decide together.

    Args:
        task: None if there is no such task, which is reported elsewhere.
    """
    actions = env.open("actions")
    with env.open("extensions") as section:
        first_form = not actions.data and any(name in section for name in _FIRST_FORM)
        ignore = section.take("ignore_terminations", False)
        if not isinstance(ignore, bool):
            section.problem("ignore_terminations", f"got {ignore!r}; must be true or false")
        limit, first_success = _read_limit(root, section, first_form)
        if first_form:
            actions = _first_actions(section, actions.path)
        elif not actions.data and task is not None:
            term = "{delta_qpos: {func: DeltaQposTerm, params: {scale: 0.1}}}"
            env.report.refuse(actions.path, f"is missing; give an action term, such as {term}")
        moved = ("action_type", "action_scale") if first_form else ()
        values = {str(name): value for name, value in section.items() if name not in moved}
        _note_others(section, task)
    return Extensions(freeze(values), actions, limit, first_success, ignore is True)


def _read_limit(root: Section, section: Section, first_form: bool) -> tuple[int, bool]:
    """Steps of an episode, and whether they are given as in 0.1.0 and 0.1.1."""
    report, key = root.report, section.key("episode_length")
    given = "max_episode_steps" in root or "max_episode_steps" in section
    limit = root.integer("max_episode_steps", FIRST_LIMIT if first_form else LIMIT)
    if "max_episode_steps" in section:  # it replaces the other one there
        inner = section.integer("max_episode_steps", limit)
        if "max_episode_steps" in root and inner != limit:
            section.problem("max_episode_steps", f"is {inner}, but max_episode_steps is {limit}; keep one")
        limit = inner
    if not first_form:
        section.ignore("episode_length", f"no effect with env.actions: max_episode_steps decides, {limit} here")
        return limit, False
    if "episode_length" not in section:
        if not given:
            text = f"is not given: {FIRST_LIMIT}, as in EmbodiChain 0.1.1 without env.extensions.episode_length"
            root.note("max_episode_steps", text, "renamed")
        return limit, not given
    length = section.integer("episode_length", limit, at_least=1)
    if given and length != limit:
        text = (
            f"is {length}, but max_episode_steps is {limit}; keep one: EmbodiChain reads this up to 0.1.1, and "
            "max_episode_steps from 0.1.2 on"
        )
        report.refuse(key, text)
    return length, not given


def _first_actions(section: Section, path: str) -> Section:
    """The action term that ``action_type``, ``action_scale`` and ``joint_limits`` stand for."""
    kind = section.take("action_type", "delta_qpos")
    scale = section.number("action_scale", 1.0)
    params: dict[str, Any] = {"scale": scale}
    if not isinstance(kind, str) or kind not in _ACTION_TYPES:
        section.problem("action_type", f"got {kind!r}; allowed: {', '.join(_ACTION_TYPES)}")
        return Section({}, path, KeyReport())
    func = _ACTION_TYPES[kind]
    if kind == "eef_pose":
        params["pose_dim"] = 6  # as many numbers as the arm has joints; 7 are for arms of seven
    elif "joint_limits" in section and "action_type" not in section:  # PushCube before it had types, in no release
        limit = section.number("joint_limits", 1.0, above=0.0)
        func = "RelativeJointPositionAction"
        params |= {"part_name": "arm", "clip": limit / abs(scale) if scale else None}
    said = f"env.actions: {kind}" + ("" if "action_type" in section else ", which is meant without action_type")
    for name in ("action_type", "action_scale"):
        if name in section:
            section.note(name, said, "renamed")
    return Section({kind: {"func": func, "params": params}}, path, KeyReport())


def _note_others(section: Section, task: Task | None) -> None:
    """Report for every key not read so far whether the task reads it, and its effect otherwise."""
    for name in section.data:
        key = section.key(str(name))
        if name in _SETTINGS_ELSEWHERE:
            text = (
                f"replaces EmbodiChain's setting {name}, which ejax reads elsewhere; give {_SETTINGS_ELSEWHERE[name]}"
            )
            section.report.refuse(key, text)
        elif task is not None and name in task.extensions:
            section.take(str(name))
            if name == "success_threshold" and not _is_positive(section.data[name]):
                section.report.refuse(key, f"got {section.data[name]!r}; must be a number > 0, in m")
        elif key not in section.report.by_key:
            section.report.add(key, "without effect", IGNORED["env.extensions"].get(str(name), _OF_NOBODY))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
