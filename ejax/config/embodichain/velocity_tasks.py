"""A gym config of EmbodiChain's velocity tasks, as arguments of ``VelocityRL``.

It gives the control rate, the length of an episode and the pushes; the rest is refused where it differs from the class.
"""

import math
from typing import TYPE_CHECKING, Any

from ejax.envs.manager.vocabulary import IGNORED
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import tables_beside
from ejax.schema.sections import Section

if TYPE_CHECKING:
    from ejax.envs.locomotion.robots import LeggedRobot

VELOCITY_ENV = "VelocityRL"
_TABLES = tables_beside(__file__)
_IGNORED: dict[str, dict[str, str]] = _TABLES["ignored"]
_AXES = ("x", "y", "z", "roll", "pitch", "yaw")
_PUSH = "push_articulation_by_setting_velocity"
_REWARD = "velocity_locomotion_total_reward"
_OBSERVATION = "velocity_locomotion_observation"


def velocity_robot(task: str) -> str | None:
    """Return the robot of a gym config's ``id``; None: it is no velocity task that ejax has."""
    robot: str | None = _TABLES["robots"].get(task.partition("-")[0])
    return robot


def read_velocity_task(root: Section, robot: str) -> dict[str, Any]:
    """Read ``env.cfg``; what cannot be done goes into the section's report."""
    from ejax.envs.locomotion.catalog import velocity_task  # imports MuJoCo

    task = velocity_task(robot)
    root.take("id")
    root.ignore_all(IGNORED[""])
    root.take("num_envs")
    for name in ("background", "rigid_object", "rigid_object_group", "articulation"):
        root.refuse(name, "a velocity task has a floor and a robot, nothing else")
    with root.open("physics_config") as physics:
        for name, wanted in (("gravity", (0.0, 0.0, -9.81)), ("physics_dt", task.timestep), ("num_substeps", 1)):
            physics.expect(name, wanted, f"the velocity task of {task.robot.name} has {wanted}")
        physics.ignore_all(IGNORED["physics_config"] | _IGNORED["physics_config"])
    with root.open("robot") as section:
        _read_robot(section, task.robot)
    for sensor in root.listed("sensor"):
        if sensor.take("sensor_type") != "ContactSensor":
            sensor.problem("sensor_type", "velocity tasks have a ContactSensor, nothing else")
        sensor.ignore_all(_IGNORED["sensor"])
    with root.open("env") as env:
        env.take("num_envs")
        env.ignore_all(IGNORED["env"])
        cfg: dict[str, Any] = {"robot": robot, "max_episode_steps": root.integer("max_episode_steps", 1000, at_least=1)}
        cfg["sim_steps_per_control"] = env.integer("sim_steps_per_control", task.sim_steps_per_control, at_least=1)
        env.refuse("extensions", "the task's class reads none")
        env.refuse("target_control_frequency", "give sim_steps_per_control instead")
        env.expect("control_parts", ["locomotion"], "the policy acts on all joints: ['locomotion']")
        cfg["push"] = _read_push(env.open("events"))
        _read_actions(env.open("actions"))
        _read_rewards(env.open("rewards"))
        if not _read_observations(env.open("observations")):
            cfg["noise"] = dict.fromkeys(task.noise, 0.0)
    return cfg


def _read_robot(section: Section, robot: "LeggedRobot") -> None:
    """Judge keys that EmbodiChain's classes replace by the task's own numbers."""
    section.take("uid")
    links = "env.cfg.model, which you give" if robot.source is None else robot.source.replace(":", "/")
    section.ignore("fpath", f"no effect: links and collision shapes are {links}")
    text = f"episodes start at height {robot.height}, around [0, 0]"
    section.expect("init_pos", [0.0, 0.0, robot.height], text)
    with section.open("control_parts") as parts:
        parts.expect("locomotion", list(robot.joints), f"must be {', '.join(robot.joints)}, in this order")
    with section.open("root_props") as root_props:
        root_props.expect("fixed_base", False, "the robot walks; give false")
        touches = bool(robot.self_contacts)
        root_props.expect("self_collision_enabled", touches, f"must be {str(touches).lower()} for {robot.name}")
        if touches:
            pairs = "; ".join(" and ".join(pair) for pair in robot.self_contacts)
            root_props.note("self_collision_enabled", f"of the pairs {pairs.replace('_collision', '')}")
        for name in ("min_position_iters", "min_velocity_iters"):
            root_props.ignore(name, IGNORED["robot"][name])
    with section.open("joint_drive_props") as drives:
        drives.expect("drive_type", "force", "velocity tasks have drives of forces: force")
        drives.ignore_all(_IGNORED["joint_drive_props"])
        for name in ("stiffness", "damping", "max_effort"):
            # a number for all joints can be right only where all of the robot's have the same
            first, *others = getattr(robot.drives, name)
            given = drives.take(name, first)
            if given not in (first, {".*": first}) or (name in drives and set(others) > {first}):
                drives.problem(name, f"got {short_repr(given)}; the drives of {robot.name} have {first}")
    section.ignore_all(_IGNORED["robot"])
    # of manipulators, whose base is fixed; a walking robot's is not, as refused above
    section.ignore_all(
        {name: text for name, text in IGNORED["robot"].items() if name not in ("root_props", "fix_base")}
    )


def _read_push(events: Section) -> dict[str, Any] | None:
    push: dict[str, Any] | None = None
    for _, event in events.sections():
        func = event.take("func")
        event.ignore_all(IGNORED["env.events"])
        if func != _PUSH or push is not None:
            event.problem("func", f"got {func!r}; ejax's velocity tasks have one {_PUSH}")
            event.skip("its functor is not there")
            continue
        if event.take("mode") != "interval" or event.integer("interval_step", 1) != 1:
            event.problem("mode", "a push has mode interval and interval_step 1: its own timer says when it is due")
        with event.open("params") as params:
            with params.open("entity_cfg") as entity:
                entity.take("uid")
            push = {"interval": list(params.numbers("interval_range_s", (math.inf, math.inf), 2))}
            with params.open("velocity_range") as ranges:
                push |= {axis: list(ranges.numbers(axis, (0.0, 0.0), 2)) for axis in _AXES}
    return push


def _read_actions(actions: Section) -> None:
    for _, term in actions.sections():
        contract, func = term.take("contract"), term.take("func")
        if (what := contract or func) not in ("joint_position.default_offset@1", "DefaultJointPositionAction"):
            term.problem("contract", f"got {what!r}; velocity tasks act by joint_position.default_offset@1")
        term.ignore_all(_IGNORED["action"])
        with term.open("params") as params:
            params.expect("clip", 1.0, "actions are clipped to ±1")


def _read_rewards(rewards: Section) -> None:
    for _, term in rewards.sections():
        _expect_func(term, _REWARD)
        term.expect("weight", 1.0, "must be 1; change the weights of terms by env.cfg.rewards")
        term.refuse("params", f"{_REWARD} has none; change terms by env.cfg.rewards")


def _read_observations(observations: Section) -> bool:
    noisy = True
    for name, term in observations.sections():
        path = term.take("name", name)
        _expect_func(term, _OBSERVATION)
        term.ignore_all(IGNORED["env.observations"])
        with term.open("params") as params:
            wanted = "critic" if params.take("privileged", False) else "policy"
            corrupted = bool(params.take("enable_corruption", False))
        if path != wanted:
            term.problem("name", f"got {path!r}; this observation is called {wanted} here")
        noisy = corrupted if wanted == "policy" else noisy
    return noisy


def _expect_func(term: Section, func: str) -> None:
    if (given := term.take("func")) != func:
        term.problem("func", f"got {given!r}; must be {func}")
    term.expect("mode", "add", "must be add")
