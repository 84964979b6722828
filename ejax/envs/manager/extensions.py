"""``env.extensions`` of a gym config: entries that EmbodiChain makes attributes of its environment and config.

Up to 0.1.1 they hold ``action_type`` (delta_qpos), ``action_scale`` (1.0) and ``episode_length`` (1000), since 0.1.2
replaced by ``env.actions`` and the top level's ``max_episode_steps`` (300). A config without ``env.actions`` that has
one of them is in the first form.

Source: ``RLEnv`` and the tasks of v0.1.0 and v0.1.1; ``EmbodiedEnv`` and ``EnvCfg`` of the later ones.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ejax.envs.terms.vocabulary import ACTION_TYPES, IGNORED, SETTINGS_ELSEWHERE
from ejax.schema.frozen import freeze
from ejax.schema.problems import KeyReport
from ejax.schema.sections import Section
from ejax.schema.values import is_positive

FIRST_LIMIT, LIMIT = 1000, 300
"""Default steps of an episode: in the first form, and later."""
FIRST_EXTENSIONS = ("action_type", "action_scale", "episode_length")
_OF_NOBODY = "no effect, unless a functor of yours reads it from world.extensions"


def read_extensions(
    root: Section, env: Section, task: Collection[str] | None, default_limit: int | None = None
) -> tuple[Mapping[str, Any], Section, int, bool]:
    """Read ``env.extensions``, ``env.actions`` or its equivalent in the first form, ``max_episode_steps``, and whether
    success is the first form's.

    ``task``: the entries that the task reads; None: no task, which is reported elsewhere. ``default_limit``: of
    ``max_episode_steps``; None: as above."""
    actions = env.open("actions")
    with env.open("extensions") as section:
        # ``env.actions`` came with 0.1.2, which reads none of these
        first_form = not actions.data and any(name in section for name in FIRST_EXTENSIONS)
        section.flag("ignore_terminations", False)  # checks it; it is read from the values
        limit, first_success = _read_limit(root, section, first_form, default_limit)
        # what those releases did, in terms of the later ones
        if first_form:
            actions = _first_actions(section, actions.path)
        elif not actions.data and task is not None:
            term = "{delta_qpos: {func: DeltaQposTerm, params: {scale: 0.1}}}"
            env.problem("actions", f"is missing; add an action term, such as {term}")
        moved = ("action_type", "action_scale") if first_form else ()
        values = {str(name): value for name, value in section.items() if name not in moved}
        # last: a key that something has read by now keeps its note
        for name in map(str, section.data):
            if name in SETTINGS_ELSEWHERE:
                instead = f"which ejax reads elsewhere; set {SETTINGS_ELSEWHERE[name]}"
                section.problem(name, f"replaces EmbodiChain's setting {name}, {instead}")
            elif task is not None and name in task:
                section.take(name)
                if name == "success_threshold" and not is_positive(section.data[name]):
                    section.problem(name, f"got {section.data[name]!r}; must be a number > 0, in m")
            elif section.key(name) not in section.report.by_key:
                section.note(name, IGNORED["env.extensions"].get(name, _OF_NOBODY), "without effect")
    return freeze(values), actions, limit, first_success


def _read_limit(root: Section, section: Section, first_form: bool, default: int | None) -> tuple[int, bool]:
    given = "max_episode_steps" in root or "max_episode_steps" in section
    usual = default or (FIRST_LIMIT if first_form else LIMIT)
    limit = root.integer("max_episode_steps", usual)
    if "max_episode_steps" in section:  # it replaces the other one there
        inner = section.integer("max_episode_steps", limit)
        if "max_episode_steps" in root and inner != limit:
            section.problem("max_episode_steps", f"is {inner}, but max_episode_steps is {limit}; keep one")
        limit = inner
    if not first_form:
        section.ignore("episode_length", f"no effect with env.actions: max_episode_steps decides, {limit} here")
        return limit, False
    if not given and "episode_length" not in section:
        why = "as it was registered" if default else "as in EmbodiChain 0.1.1 without env.extensions.episode_length"
        root.note("max_episode_steps", f"is not given: {usual}, {why}", "renamed")
    if "episode_length" not in section:
        return limit, not given
    length = section.integer("episode_length", limit, at_least=1)
    if given and length != limit:
        one = "keep one: EmbodiChain reads this up to 0.1.1, and max_episode_steps from 0.1.2 on"
        section.problem("episode_length", f"is {length}, but max_episode_steps is {limit}; {one}")
    return length, not given


def _first_actions(section: Section, path: str) -> Section:
    typed = "action_type" in section
    kind = section.take("action_type", "delta_qpos")
    scale = section.number("action_scale", 1.0)
    params: dict[str, Any] = {"scale": scale}
    if not isinstance(kind, str) or kind not in ACTION_TYPES:
        section.problem("action_type", f"got {kind!r}; allowed: {', '.join(ACTION_TYPES)}")
        return Section({}, path, KeyReport())
    func = ACTION_TYPES[kind]
    if kind == "eef_pose":
        params["pose_dim"] = 6  # as many numbers as the arm has joints; 7 are for arms of seven
    elif "joint_limits" in section and not typed:  # PushCube before it had types, in no release
        limit = section.number("joint_limits", 1.0, above=0.0)
        func = "RelativeJointPositionAction"
        params |= {"part_name": "arm", "clip": limit / abs(scale) if scale else None}
    meaning = f"env.actions: {kind}" + ("" if typed else ", which is meant without action_type")
    for name in ("action_type", "action_scale"):
        if name in section:
            section.note(name, meaning, "renamed")
    return Section({kind: {"func": func, "params": params}}, path, KeyReport())
