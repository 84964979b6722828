"""Tasks that a page can play, as plain data for ``task.js``: an observation is a list of terms, each computed from
MuJoCo's state by the function of its ``kind`` there, and the drives' control is

    ctrl = home − bias + clip(scale·clip(a, ±bound), ±limit)        home: numbers, or the joints' positions as they are
"""

from typing import Any
from xml.etree import ElementTree as ET

from ejax.envs.locomotion.velocity import VelocityRL, VelocityState
from ejax.envs.mujoco.models import ASSETS
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.schema.plain_files import read_text


def describe_task(env: Any) -> dict[str, Any]:
    """Describe the task to the page. ValueError: the page cannot compute it, and why."""
    if type(env) not in (PushCubeRL, VelocityRL):
        text = f"--web cannot compute the observation of {type(env).__name__} in a browser; it can that of PushCubeRL"
        raise ValueError(f"{text} and VelocityRL, without wrappers; ejax.play's viewer and its --video show the others")
    if env.functor_events:
        raise ValueError(f"--web cannot compute events ({', '.join(env.functor_events)}): empty trainer.events.eval")
    task = _push_cube(env) if isinstance(env, PushCubeRL) else _velocity(env)
    return {**task, "model": _model_text(env.asset), "substeps": env.num_substeps, "period": env.control_period}


def facts_of(state: Any) -> dict[str, Any]:
    """Find what an observation reads beside qpos and qvel."""
    if not isinstance(state, VelocityState):
        return {"command": state.goal}
    facts = {"command": state.command.velocity, "held": state.action, "bias": state.encoder_bias}
    return {**facts, "push_in": state.push_in[None]}


def _push_cube(env: PushCubeRL) -> dict[str, Any]:
    joints = list(range(6))
    cube = {"kind": "qpos", "joints": [6, 7, 8], "home": [0.0] * 3}
    arm = {"kind": "qpos", "joints": joints, "home": [0.0] * 6}
    return {
        "part": "obs",
        "observation": [arm, {"kind": "site", "name": "tcp"}, cube, {"kind": "command"}],
        "control": {"scale": [env.action_scale] * 6, "joints": joints, "limit": env.joint_limits},
        "command": {"kind": "place", "body": "goal"},
        "end": {"kind": "near", "joints": [6, 7], "limit": env.success_threshold},
    }


def _velocity(env: VelocityRL) -> dict[str, Any]:
    task, robot = env.task, env.task.robot
    if env.ground.kind != "flat":
        raise ValueError(f"--web draws flat ground only, got terrain.kind {env.ground.kind!r}")
    place = {"kind": "qpos", "joints": list(env.legged.joint_qpos), "home": list(robot.home)}
    known: dict[str, Any] = {name: {"kind": name} for name in ("projected_gravity", "action", "command")}
    known |= {"joint_pos": place, "measured_joint_pos": {**place, "biased": True}}
    known["joint_vel"] = {"kind": "qvel", "joints": list(env.legged.joint_qvel)}
    known["phase"] = {"kind": "phase", "period": task.phase_period, "step": env.control_period}
    if robot.imu is None:  # else they are those of another body
        known |= {name: {"kind": name} for name in ("base_lin_vel", "base_ang_vel")}
    if unknown := [name for name in task.actor if name not in known]:
        raise ValueError(f"--web cannot compute these terms of {robot.name}'s observation: {', '.join(unknown)}")
    ranges = (task.command.lin_vel_x, task.command.lin_vel_y, task.command.ang_vel_z)
    tilt = task.terminations.get("bad_orientation", {}).get("limit")
    return {
        "part": "policy",
        "observation": [{**known[name], "noise": task.noise.get(name, 0.0)} for name in task.actor],
        "control": {"scale": list(robot.drives.action_scale), "home": list(robot.home), "bound": 1.0},
        "command": {"kind": "velocity", "ranges": ranges},
        "end": tilt and {"kind": "tilt", "limit": tilt},
    }


def _model_text(asset: str) -> str:
    """Give the MJCF as one text. ValueError: it needs files beside it, other than MJCF that it includes."""
    root = ET.fromstring(asset if asset.lstrip().startswith("<") else read_text(ASSETS / asset))
    for parent in list(root.iter()):
        for i, each in reversed(list(enumerate(parent))):
            if each.tag == "include":
                parent[i : i + 1] = list(ET.fromstring(read_text(ASSETS / each.attrib["file"])))
    if files := sorted({each.attrib["file"] for each in root.iter() if "file" in each.attrib}):
        raise ValueError(f"--web embeds one MJCF, and this model has {len(files)} files beside it, such as {files[0]}")
    return ET.tostring(root, encoding="unicode")
