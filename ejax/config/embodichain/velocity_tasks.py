"""A gym config of EmbodiChain's velocity tasks, as arguments of ``VelocityRL``.

It gives the control rate, the length of an episode and the pushes; the rest is refused where it differs from the class.
"""

import math
from typing import TYPE_CHECKING, Any

from ejax.envs.manager.vocabulary import IGNORED
from ejax.schema.messages import short_repr
from ejax.schema.sections import Section

if TYPE_CHECKING:
    from ejax.envs.locomotion.robots import LeggedRobot

VELOCITY_ENV = "VelocityRL"
_ROBOTS = {
    "UnitreeGo1FlatRL": "go1",
    "UnitreeGo2FlatRL": "go2",
    "ANYmalCFlatRL": "anymal_c",
    "UnitreeG1FlatRL": "g1",
    "UnitreeH1_2FlatRL": "h1_2",
    "MicroDuckFlatRL": "microduck",
}
_AXES = ("x", "y", "z", "roll", "pitch", "yaw")


def velocity_robot(task: str) -> str | None:
    """Return the robot of a gym config's ``id``; None: it is no velocity task that ejax has."""
    return _ROBOTS.get(task.partition("-")[0])


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
        physics.ignore_all(IGNORED["physics_config"])
        physics.ignore("solver_cfg", "no effect: the model's solver is Newton, implicitfast, 10 iterations")
        physics.ignore("sync_to_renderer", "no effect: nothing is drawn while training")
    with root.open("robot") as section:
        _read_robot(section, task.robot)
    for sensor in root.listed("sensor"):
        sensor.take("sensor_type")
        if sensor.data.get("sensor_type") != "ContactSensor":
            sensor.problem("sensor_type", "velocity tasks have a ContactSensor, nothing else")
        own = "no effect: each contact that the task reads has a sensor, see docs/locomotion.md"
        for name in ("uid", "articulation_cfg_list", "filter_need_both_actor", "max_contacts_per_env"):
            sensor.ignore(name, own)
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
    ignored = {name: text for name, text in IGNORED["robot"].items() if name not in ("root_props", "fix_base")}
    section.take("uid")
    links = "env.cfg.model, which you give" if robot.source is None else robot.source.replace(":", "/")
    section.ignore("fpath", f"no effect: links and collision shapes are {links}")
    section.ignore("qpos_limits", "no effect: joints have the limits of the file that has the links")
    section.ignore("init_qpos", "no effect, as in EmbodiChain: an episode starts at the task's home position")
    place = [0.0, 0.0, robot.height]
    section.expect("init_pos", place, f"episodes start at height {robot.height}, around [0, 0]")
    with section.open("control_parts") as parts:
        joints = list(robot.joints)
        parts.expect("locomotion", joints, f"must be {', '.join(joints)}, in this order")
    with section.open("root_props") as root_props:
        root_props.expect("fixed_base", False, "the robot walks; give false")
        touches = bool(robot.self_contacts)
        root_props.expect("self_collision_enabled", touches, f"must be {str(touches).lower()} for {robot.name}")
        if touches:
            pairs = "; ".join(" and ".join(pair) for pair in robot.self_contacts)
            root_props.note("self_collision_enabled", f"of the pairs {pairs.replace('_collision', '')}")
        for name in ("min_position_iters", "min_velocity_iters"):
            root_props.ignore(name, ignored[name])
    with section.open("joint_drive_props") as drives:
        drives.expect("drive_type", "force", "velocity tasks have drives of forces: force")
        drives.ignore("max_velocity", "no effect: velocity limits have no counterpart")
        for name in ("stiffness", "damping", "max_effort"):
            first, *others = getattr(robot.drives, name)
            given = drives.take(name, first)
            if given not in (first, {".*": first}) or (name in drives and set(others) > {first}):
                drives.problem(name, f"got {short_repr(given)}; the drives of {robot.name} have {first}")
    section.ignore_all(ignored)


def _read_push(events: Section) -> dict[str, Any] | None:
    push: dict[str, Any] | None = None
    for _, event in events.sections():
        func = event.take("func")
        event.ignore_all(IGNORED["env.events"])
        if func != "push_articulation_by_setting_velocity" or push is not None:
            event.problem("func", f"got {func!r}; ejax's velocity tasks have one push_articulation_by_setting_velocity")
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
        what = term.take("contract") or term.take("func")
        term.take("func")
        if what not in ("joint_position.default_offset@1", "DefaultJointPositionAction"):
            term.problem("contract", f"got {what!r}; velocity tasks act by joint_position.default_offset@1")
        term.ignore("mode", "no effect: an action term acts before physics")
        with term.open("params") as params:
            params.expect("clip", 1.0, "actions are clipped to ±1")


def _read_rewards(rewards: Section) -> None:
    for _, term in rewards.sections():
        func = "velocity_locomotion_total_reward"
        if (given := term.take("func")) != func:
            term.problem("func", f"got {given!r}; must be {func}. Change terms by env.cfg.rewards")
        if term.take("mode", "add") != "add" or term.number("weight", 1.0) != 1.0:
            term.problem("weight", "must be 1, with mode add; change the weights of terms by env.cfg.rewards")
        term.refuse("params", f"{func} has none")


def _read_observations(observations: Section) -> bool:
    noisy = True
    for name, term in observations.sections():
        path, func = term.take("name", name), term.take("func")
        if func != "velocity_locomotion_observation" or term.take("mode", "add") != "add":
            term.problem("func", f"got {func!r}; must be velocity_locomotion_observation, with mode add")
        term.ignore_all(IGNORED["env.observations"])
        with term.open("params") as params:
            wanted = "critic" if params.take("privileged", False) else "policy"
            corrupted = bool(params.take("enable_corruption", False))
        if path != wanted:
            term.problem("name", f"got {path!r}; this observation is called {wanted} here")
        noisy = corrupted if wanted == "policy" else noisy
    return noisy
