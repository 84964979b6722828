"""One HTML file that plays a policy without a network: MuJoCo's WebAssembly build, the MLP in plain JavaScript, and the
reference episode, which it replays to show how far the visitor's machine is from JAX."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import mujoco
import numpy as np

from ejax.envs.host.calls import closing
from ejax.play.player import play_pure
from ejax.play.saved_policy import chosen_checkpoint, elsewhere, load_policy
from ejax.policies import ActorCritic, ActorOnly
from ejax.policies.actor_q import ActorQ
from ejax.policies.heads import injected
from ejax.runtime.device import matmul_precision, prepare_jax
from ejax.schema.plain_files import make_folder, read_bytes, read_text, replace_file
from ejax.store.run_dir import open_policy_run
from ejax.training.environments import build_env
from ejax.types import Env, HostEnv, Params, Policy
from interop.artefacts.episode import as_document
from interop.checkpoints.weights import state_dict_from_params
from interop.exporters.record import described, exporter_of
from interop.web.tasks import describe_task, facts_of

_HERE = Path(__file__).parent
_PACKAGE = Path("node_modules", "@mujoco", "mujoco")


def write_page(
    run: Path, to: Path, wasm: Path | None, overrides: Sequence[str], show: Mapping[str, Any]
) -> dict[str, object]:
    """Write the page of a run's checkpoint; ``show`` has options of ``Show``, ``wasm`` is the folder of npm's
    ``@mujoco/mujoco``, None: in a ``node_modules`` here or above. ValueError: what the page cannot compute."""
    if to.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--web {to}: a page is written as .html; give --web FILE.html")
    engine = _read_engine(wasm)
    directory, config = open_policy_run(run, show["member"])
    prepare_jax(show["device"])
    config = elsewhere(config, overrides)
    trainer, path = config.trainer, chosen_checkpoint(directory, show["checkpoint"], "ejax.play")
    seed = trainer.eval_seed if show["seed"] is None else show["seed"]
    with matmul_precision(trainer.matmul_precision, show["device"]):
        env = build_env(config, phase="eval", num_envs=1, quarantine=directory.path / "quarantine" / "play")
        if isinstance(env, HostEnv):
            with closing(env):
                raise ValueError(f"--web: {config.env.id} is stepped outside JAX, and a browser cannot step it")
        data = page_data(*load_policy(config, env, path), env, seed)
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
    moments = play_pure(policy, env, params, jax.random.key(seed))
    states, steps = [next(moments).sights[0]], []
    for moment in moments:
        states.append(moment.sights[0])
        steps.append(moment)
        if moment.ended:
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
    """Weights of the actor, as the export has them. ValueError: it is no MLP that reads that part alone."""
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
        raise FileNotFoundError(f"{text}, then give --wasm {_PACKAGE}")
    version = json.loads(read_text(found / "package.json"))["version"]
    return {name: read_bytes(found / f"mujoco.{name}") for name in ("js", "wasm")} | {"version": version}
