"""One HTML file that plays a policy without a network: MuJoCo's WebAssembly build, the MLP in plain JavaScript, and the
reference episode, which it replays to show how far the visitor's machine is from JAX."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jax
import mujoco
import numpy as np

from ejax.envs.host.calls import closing
from ejax.envs.locomotion.velocity import VelocityRL, VelocityState
from ejax.envs.mujoco.models import ASSETS
from ejax.envs.tasks.push import HALF_EDGE, PushCube
from ejax.envs.tasks.push_cube import PushCubeRL, PushTask
from ejax.play.saved_policy import opened_policy, restore_policy
from ejax.play.show import play_episodes
from ejax.policies import ActorCritic, ActorOnly
from ejax.policies.actor_q import ActorQ
from ejax.policies.heads import injected
from ejax.schema.plain_files import read_bytes, read_text
from ejax.schema.writing import make_folder, replace_file
from ejax.training.environments import build_env
from ejax.types import Env, HostEnv, Params, Policy
from interop.artefacts.episode import as_document
from interop.checkpoints.weights import state_dict_from_params
from interop.exporters.record import described, exporter_of


def describe_task(env: Any) -> dict[str, Any]:
    """Describe the task to the page. ValueError: the page cannot compute it, and why."""
    if type(env) not in (PushCube, PushCubeRL, VelocityRL):
        text = f"--web cannot compute the observation of {type(env).__name__} in a browser; it can those of PushCube"
        others = "PushCubeRL and VelocityRL, without wrappers; ejax play's viewer and its --video show the others"
        raise ValueError(f"{text}, {others}")
    if env.functor_events:
        raise ValueError(f"--web cannot compute events ({', '.join(env.functor_events)}): empty trainer.events.eval")
    task = _push_cube(env) if isinstance(env, PushTask) else _velocity(env)
    return {**task, "model": _model_text(env.asset), "substeps": env.num_substeps, "period": env.control_period}


def facts_of(state: Any) -> dict[str, Any]:
    """Find what an observation reads besides qpos and qvel."""
    if not isinstance(state, VelocityState):
        return {"command": state.goal}
    facts = {"command": state.command.velocity, "held": state.action, "bias": state.encoder_bias}
    return {**facts, "push_in": state.push_in[None]}


def _push_cube(env: PushTask) -> dict[str, Any]:
    joints = list(range(6))
    cube: dict[str, Any] = {"kind": "qpos", "joints": [6, 7, 8], "home": [0.0] * 3}
    arm, tool = {"kind": "qpos", "joints": joints, "home": [0.0] * 6}, {"kind": "site", "name": "tcp"}
    goal = {"kind": "command"}
    observation: list[dict[str, Any]] = [arm, tool, cube, goal]
    end: dict[str, Any] = {"kind": "near", "joints": [6, 7], "limit": env.success_threshold}
    bound = {"limit": env.joint_limits} if isinstance(env, PushCubeRL) else {"bound": 1.0}
    if isinstance(env, PushCube):
        turned = {"kind": "qpos", "joints": [9, 10, 11, 12], "home": [0.0] * 4}
        moving = {"kind": "qvel", "joints": list(range(12))}
        ways = [{"kind": "difference", "of": of, "minus": minus} for of, minus in ((cube, tool), (goal, cube))]
        observation += [turned, moving, {**ways[0], "width": 3}, {**ways[1], "width": 2}]
        end["speed"] = {"joints": [6, 7, 8], "limit": env.success_max_speed}
        end["below"] = {"joint": 8, "limit": HALF_EDGE + env.max_lift}
    return {
        "part": "obs",
        "observation": observation,
        "control": {"scale": [env.action_scale] * 6, "joints": joints, **bound},
        "command": {"kind": "place", "body": "goal"},
        "end": end,
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
    """Return the MJCF as one text. ValueError: it needs files next to it, other than MJCF that it includes."""
    root = ET.fromstring(asset if asset.lstrip().startswith("<") else read_text(ASSETS / asset))
    for parent in list(root.iter()):
        for i, each in reversed(list(enumerate(parent))):
            if each.tag == "include":
                parent[i : i + 1] = list(ET.fromstring(read_text(ASSETS / each.attrib["file"])))
    if files := sorted({each.attrib["file"] for each in root.iter() if "file" in each.attrib}):
        raise ValueError(f"--web embeds one MJCF, and this model has {len(files)} files next to it, such as {files[0]}")
    return ET.tostring(root, encoding="unicode")


_HERE = Path(__file__).parent
_PACKAGE = Path("node_modules", "@mujoco", "mujoco")


def write_page(
    run: Path, to: Path, wasm: Path | None, overrides: Sequence[str], show: Mapping[str, Any]
) -> dict[str, object]:
    """Write the page of a run's checkpoint; ``show`` has options of ``Viewer``, ``wasm`` is the folder of npm's
    ``@mujoco/mujoco``, None: in a ``node_modules`` here or above. ValueError: what the page cannot compute."""
    if to.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--web {to}: a page is written as .html; pass --web FILE.html")
    engine = _read_engine(wasm)
    which = {name: show[name] for name in ("member", "checkpoint", "device")}
    with opened_policy(run, overrides, **which, command="ejax play") as (directory, config, path):
        trainer = config.trainer
        seed = trainer.eval_seed if show["seed"] is None else show["seed"]
        env = build_env(config, phase="eval", num_envs=1, quarantine=directory.results / "quarantine" / "play")
        if isinstance(env, HostEnv):
            with closing(env):
                raise ValueError(f"--web: {config.env.id} is stepped outside JAX, and a browser cannot step it")
        data = page_data(*restore_policy(config, env, path), env, seed)
    data |= {"title": f"{trainer.exp_name} · {config.env.id}", "checkpoint": path.name}
    data["versions"] = {"jax": jax.__version__, "mujoco": mujoco.__version__, "wasm": engine.pop("version")}
    make_folder(to.parent)
    replace_file(to, assemble(data, engine))
    return {"page": to, "MB": round(to.stat().st_size / 1e6, 1), "checkpoint": str(path)}


def page_data(policy: Policy, params: Params, env: Env, seed: int) -> dict[str, Any]:
    """Make what the page reads: the task, the policy, and the reference episode with all its steps. ValueError: a task
    or a policy that the page cannot compute."""
    task = describe_task(env)
    weights = _policy(policy, params, env, task["part"])
    played = play_episodes(policy, env, params, seed)
    states, steps = [next(played).frames[0]], []
    for step in played:
        states.append(step.frames[0])
        steps.append(step)
        if step.ended:
            break
    result = {"return": sum(each.reward for each in steps), "length": len(steps), **steps[-1].facts}
    facts = [facts_of(state) for state in states]
    rows = {
        "observation": [each.obs[task["part"]] if isinstance(each.obs, Mapping) else each.obs for each in steps],
        "action": [each.action for each in steps],
        "qpos": [state.physics.qpos for state in states],
        "qvel": [state.physics.qvel for state in states],
        **{name: [each[name] for each in facts] for name in facts[0]},
    }
    packed = {name: _packed(each) for name, each in rows.items()}
    return {"task": task, "policy": weights, "episode": as_document(seed, states[0], result), "steps": packed}


def assemble(data: Mapping[str, Any], engine: Mapping[str, bytes]) -> str:
    """Put the parts into the template. ``engine``: its program, ``js``, and its code, ``wasm``."""
    parts = {path.name: read_text(path) for path in _HERE.glob("[!.]*.js")}
    parts["data"] = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts |= {name: base64.b64encode(gzip.compress(x, mtime=0)).decode() for name, x in engine.items()}
    head, *rest = read_text(_HERE / "page.html").split("{{")
    return head + "".join(parts[name] + text for name, text in (each.split("}}", 1) for each in rest))


def _policy(policy: Policy, params: Params, env: Env, part: str) -> dict[str, Any]:
    """Pack the actor's weights, as the export has them. ValueError: it is not an MLP that reads that part alone."""
    if injected(policy) or type(policy) not in (ActorCritic, ActorOnly, ActorQ):
        text = (
            "--web computes the MLPs of actor_critic and actor_q only, without memory, images and modules of your own"
        )
        raise ValueError(f"{text}; the run's policy is of the class {type(policy).__name__}")
    exporter: Any = exporter_of(policy)
    exported, spec = described(exporter, policy, env)
    if spec.actor.inputs != (part,):
        read = ", ".join(spec.actor.inputs)
        raise ValueError(f"--web computes the part '{part}' of the observation, and the actor reads {read}")
    weights = state_dict_from_params(exported, exporter.exported_params(policy, params))
    actor, depth = spec.actor, len(spec.actor.hidden_sizes)
    return {
        "linear": [_layer(weights, i * actor.stride) for i in range(depth + 1)],
        "norm": [_layer(weights, i * actor.stride + 1) for i in range(depth)] if actor.use_layernorm else None,
        "activation": actor.activation,
        "last": actor.last_activation or "none",
        "normalizer": [_packed(weights[f"actor_obs_normalizer.{x}"]) for x in ("mean", "standard_deviation")]
        if actor.normalized
        else None,
        "squashed": [spec.low, spec.high] if spec.head == "tanh_normal" else None,
    }


def _layer(weights: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    return [_packed(weights[f"actor.{index}.{name}"]) for name in ("weight", "bias")]


def _packed(rows: Any) -> dict[str, Any]:
    x = np.asarray(rows, "<f4")
    return {"width": x.shape[-1], "data": base64.b64encode(x.tobytes()).decode()}


def _read_engine(folder: Path | None) -> dict[str, Any]:
    here = Path.cwd()
    places = [folder] if folder else [each / _PACKAGE for each in (here, *here.parents)]
    found = next((place for place in places if (place / "mujoco.wasm").is_file()), None)
    if found is None:
        where = f"in {folder}" if folder else "in node_modules here or above"
        text = f"--web needs MuJoCo's WebAssembly build, and there is none {where}: npm install @mujoco/mujoco"
        raise FileNotFoundError(f"{text}, then pass --wasm {_PACKAGE}")
    version = json.loads(read_text(found / "package.json"))["version"]
    return {name: read_bytes(found / f"mujoco.{name}") for name in ("js", "wasm")} | {"version": version}
