"""A gym config of EmbodiChain's velocity tasks: the arguments of ``VelocityRL``, and what becomes of each key.

There the task's class has most of the numbers, in files of its own; here the robot's file has. The gym config gives how
often there are decisions, how long an episode is and how the robot is pushed; the rest of it is what the class expects
anyway, and is refused where it differs.
"""

import math
from typing import TYPE_CHECKING, Any

from ejax.envs.manager.vocabulary import IGNORED
from ejax.schema.messages import short_repr
from ejax.schema.sections import Section

if TYPE_CHECKING:
    from ejax.envs.locomotion.robots import LeggedRobot
    from ejax.envs.locomotion.tasks import VelocityTask

VELOCITY_ENV = "VelocityRL"
"""The registered name of the environment."""
_ROBOTS = {
    "UnitreeGo1FlatRL": "go1",
    "UnitreeGo2FlatRL": "go2",
    "ANYmalCFlatRL": "anymal_c",
    "UnitreeG1FlatRL": "g1",
    "UnitreeH1_2FlatRL": "h1_2",
    "MicroDuckFlatRL": "microduck",
}
_GRAVITY = (0.0, 0.0, -9.81)
_AXES = ("x", "y", "z", "roll", "pitch", "yaw")
_SOLVER = "no effect: the model's solver is Newton, implicitfast, 10 iterations"
_OWN_SCENE = "a velocity task has a floor and a robot, nothing else"


def velocity_robot(task: str) -> str | None:
    """The robot of a gym config's ``id``. None: it is no velocity task that ejax has."""
    return _ROBOTS.get(task.partition("-")[0])


def read_velocity_task(root: Section, robot: str) -> dict[str, Any]:
    """``env.cfg`` for the gym config; what cannot be done goes into the section's report."""
    from ejax.envs.locomotion.catalog import velocity_task  # imports MuJoCo

    task = velocity_task(robot)
    root.take("id")
    root.ignore_all(IGNORED[""])
    root.take("num_envs")
    for name in ("background", "rigid_object", "rigid_object_group", "articulation"):
        root.refuse(name, _OWN_SCENE)
    _read_physics(root, task)
    _read_robot(root, task.robot)
    _read_sensors(root)
    with root.open("env") as env:
        env.take("num_envs")
        env.ignore_all(IGNORED["env"])
        cfg: dict[str, Any] = {"robot": robot, "max_episode_steps": root.integer("max_episode_steps", 1000, at_least=1)}
        cfg["sim_steps_per_control"] = env.integer("sim_steps_per_control", task.sim_steps_per_control, at_least=1)
        env.refuse("extensions", "the task's class reads none")
        env.refuse("target_control_frequency", "give sim_steps_per_control instead")
        parts = env.take("control_parts", ["locomotion"])
        if list(parts) != ["locomotion"]:
            env.problem("control_parts", f"got {short_repr(parts)}; the policy acts on all joints: ['locomotion']")
        cfg["push"] = _read_push(env.open("events"))
        _read_actions(env.open("actions"))
        _read_rewards(env.open("rewards"))
        if not _read_observations(env.open("observations")):
            cfg["noise"] = dict.fromkeys(task.noise, 0.0)
    return cfg


def _read_physics(root: Section, task: "VelocityTask") -> None:
    with root.open("physics_config") as physics:
        for name, value, wanted in (
            ("gravity", physics.numbers("gravity", _GRAVITY, 3), _GRAVITY),
            ("physics_dt", physics.number("physics_dt", task.timestep), task.timestep),
            ("num_substeps", physics.integer("num_substeps", 1), 1),
        ):
            if value != wanted:
                physics.problem(name, f"got {short_repr(value)}; the velocity task of {task.robot.name} has {wanted}")
        physics.ignore_all(IGNORED["physics_config"])
        physics.ignore("solver_cfg", _SOLVER)
        physics.ignore("sync_to_renderer", "no effect: nothing is drawn while training")


def _read_robot(root: Section, robot: "LeggedRobot") -> None:
    with root.open("robot") as section:
        section.take("uid")
        links = "env.cfg.model, which you give" if robot.source is None else robot.source.replace(":", "/")
        section.ignore("fpath", f"no effect: links and collision shapes are {links}")
        section.ignore("qpos_limits", "no effect: joints have the limits of the file that has the links")
        _read_drives(section, robot)
        section.ignore("init_qpos", "no effect, as in EmbodiChain: an episode starts at the task's home position")
        place = section.numbers("init_pos", (0.0, 0.0, robot.height), 3)
        if place != (0.0, 0.0, robot.height):
            section.problem("init_pos", f"got {list(place)}; episodes start at height {robot.height}, around [0, 0]")
        with section.open("control_parts") as parts:
            joints = parts.take("locomotion", robot.joints)
            if tuple(joints) != robot.joints:
                parts.problem(
                    "locomotion", f"got {short_repr(joints)}; must be {', '.join(robot.joints)}, in this order"
                )
        with section.open("root_props") as root_props:
            if root_props.take("fixed_base", False) is not False:
                root_props.problem("fixed_base", "the robot walks; give false")
            touches = bool(robot.self_contacts)
            if root_props.take("self_collision_enabled", touches) is not touches:
                root_props.problem("self_collision_enabled", f"must be {str(touches).lower()} for {robot.name}")
            elif touches:
                pairs = "; ".join(" and ".join(pair) for pair in robot.self_contacts)
                root_props.note("self_collision_enabled", f"of the pairs {pairs.replace('_collision', '')}")
            root_props.ignore_all(
                {name: IGNORED["robot"][name] for name in ("min_position_iters", "min_velocity_iters")}
            )
        section.ignore_all(
            {name: text for name, text in IGNORED["robot"].items() if name not in ("root_props", "fix_base")}
        )


def _read_drives(section: Section, robot: "LeggedRobot") -> None:
    """Keys that EmbodiChain's classes replace by the task's own numbers, which are these."""
    if "joint_drive_props" not in section:
        return
    with section.open("joint_drive_props") as drives:
        if drives.take("drive_type", "force") != "force":
            drives.problem("drive_type", "velocity tasks have drives of forces: force")
        drives.ignore("max_velocity", "no effect: velocity limits have no counterpart")
        for name, own in (
            ("stiffness", robot.drives.stiffness),
            ("damping", robot.drives.damping),
            ("max_effort", robot.drives.max_effort),
        ):
            given = drives.take(name, own[0])
            if given not in (own[0], {".*": own[0]}) or len(set(own)) > 1:
                drives.problem(name, f"got {short_repr(given)}; the drives of {robot.name} have {own[0]}")


def _read_sensors(root: Section) -> None:
    sensors = root.take("sensor", ())
    if not isinstance(sensors, list | tuple):
        root.problem("sensor", f"got {short_repr(sensors)}; must be a list")
        return
    for i, data in enumerate(sensors):
        with Section(data, root.key(f"sensor[{i}]"), root.report) as sensor:
            if sensor.take("sensor_type") != "ContactSensor":
                sensor.problem("sensor_type", "velocity tasks have a ContactSensor, nothing else")
            own = "no effect: each contact that the task reads has a sensor, see docs/locomotion.md"
            sensor.ignore_all(
                dict.fromkeys(("uid", "articulation_cfg_list", "filter_need_both_actor", "max_contacts_per_env"), own)
            )


def _read_push(events: Section) -> dict[str, Any] | None:
    """Arguments of ``Push``. None: the config has no pushes."""
    push: dict[str, Any] | None = None
    for name, data in events.items():
        with Section(data, events.key(str(name)), events.report) as event:
            func = event.take("func")
            event.ignore_all(IGNORED["env.events"])
            if func != "push_articulation_by_setting_velocity" or push is not None:
                event.problem(
                    "func", f"got {func!r}; ejax's velocity tasks have one push_articulation_by_setting_velocity"
                )
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
    for name, data in actions.items():
        with Section(data, actions.key(str(name)), actions.report) as term:
            what = term.take("contract") or term.take("func")
            term.take("func")
            if what not in ("joint_position.default_offset@1", "DefaultJointPositionAction"):
                term.problem("contract", f"got {what!r}; velocity tasks act by joint_position.default_offset@1")
            term.ignore("mode", "no effect: an action term acts before physics")
            with term.open("params") as params:
                if params.number("clip", 1.0) != 1.0:
                    params.problem("clip", "actions are clipped to ±1")


def _read_rewards(rewards: Section) -> None:
    for name, data in rewards.items():
        with Section(data, rewards.key(str(name)), rewards.report) as term:
            func = term.take("func")
            if func != "velocity_locomotion_total_reward":
                text = f"got {func!r}; must be velocity_locomotion_total_reward. Change terms by env.cfg.rewards"
                term.problem("func", text)
            if term.take("mode", "add") != "add" or term.number("weight", 1.0) != 1.0:
                term.problem("weight", "must be 1, with mode add; change the weights of terms by env.cfg.rewards")
            term.refuse("params", "velocity_locomotion_total_reward has none")


def _read_observations(observations: Section) -> bool:
    """True: the actor's observation has noise."""
    noisy = True
    for name, data in observations.items():
        with Section(data, observations.key(str(name)), observations.report) as term:
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
