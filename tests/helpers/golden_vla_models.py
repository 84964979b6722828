"""pi0 and SmolVLA of ejax beside lerobot's, block by block; the folders that lerobot would write for them."""

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pairs import Pair
from golden_pairs import load as load_golden
from safetensors.numpy import save_file
from vla_model_inputs import CHUNK, LENGTH, STEPS, inputs, weight

from ejax.policies.pretrained.transformer import time_features
from ejax.policies.vla import lerobot_policy
from ejax.policies.vla.config import HeadConfig, VLAConfig
from ejax.policies.vla.expert import ExpertNetwork, fit_picture
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.policies.vla.lerobot_policy import LeRobotPolicy
from ejax.types import Params

FILE = "vla_models.npz"
KINDS = ("pi0", "smolvla")
GIVEN = inputs()


def write_folder(folder: Path, kind: str, rename: Any = lambda name: name, **options: Any) -> Path:
    """Write what lerobot writes: weights, options, statistics; and a tokenizer of words."""
    folder.mkdir(exist_ok=True)
    shapes = json.loads(str(load_golden(FILE)[f"{kind}/shapes"]))
    arrays = {name: weight(f"{kind}/{name}", tuple(shape)).astype(np.float32) for name, shape in shapes.items()}
    save_file({rename(name): x for name, x in arrays.items() if rename(name)}, folder / "model.safetensors")
    config = {**json.loads(str(load_golden(FILE)[f"{kind}/config"])), "tokenizer_max_length": LENGTH, **options}
    (folder / "config.json").write_text(json.dumps(config))
    stats = {name.removeprefix("stats/"): x for name, x in GIVEN.items() if name.startswith("stats/")}
    save_file(stats, folder / "stats.safetensors")
    step = {"registry_name": "normalizer_processor", "config": {"eps": 1e-8}, "state_file": "stats.safetensors"}
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "policy_preprocessor", "steps": [step]}))
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra pretrained")
    words = {"<unk>": 0, "put": 3, "the": 4, "red": 5, "cube": 6, "\n": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "removed")
    made.save(str(folder / "tokenizer.json"))
    return folder


SPACE = gymnasium.spaces.Dict(
    {
        "top": gymnasium.spaces.Box(0, 255, (12, 16, 3), np.uint8),
        "wrist": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "state": gymnasium.spaces.Box(-9, 9, (3,), np.float32),
        "instruction": gymnasium.spaces.Box(0, 255, (32,), np.uint8),
    }
)


def make(kind: str, folder: Path | None, horizon: int = CHUNK, actions: int = 2, **model: Any) -> LeRobotPolicy:
    config = {"model_path": folder and str(folder), "inference_horizon": horizon}
    config["model_config"] = {"images": ["top", "wrist"], **model}
    action = gymnasium.spaces.Box(-1, 1, (horizon * actions,), np.float32)
    read = VLAConfig.model_validate_json(json.dumps(config))
    return lerobot_policy.make_of(kind, read, action, SPACE)


def load(policy: LeRobotPolicy, folder: Path) -> tuple[Params, list[str]]:
    obs = {name: jnp.zeros((1, *space.shape), space.dtype) for name, space in SPACE.items()}
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    return lerobot_policy.load(policy, shapes, VLAConfig(model_path=str(folder)))


@cache
def small(kind: str, folder: Path) -> tuple[LeRobotPolicy, Params]:
    policy = make(kind, folder)
    return policy, load(policy, folder)[0]


def blocks(policy: LeRobotPolicy, params: Params, dtype: str) -> dict[str, Any]:
    """Compute what the golden file has of one model."""
    network = ExpertNetwork(policy.spec)

    def run(params: Params, given: Any, noise: Any, time: Any) -> dict[str, Any]:
        apply = lambda *args, method, **kwargs: network.apply(params, *args, method=method, **kwargs)  # noqa: E731
        size, centred = policy.spec.patch * policy.spec.side, policy.spec.kind == "pi0"
        top, wrist = (fit_picture(x, size, centred=centred).astype(dtype) for x in given["pictures"])
        out: dict[str, Any] = {"picture_top": top, "picture_wrist": wrist}
        out["vision"] = apply(top, method=lambda net, x: net.vision(net.patches(x))[0])
        prefix, there, mask, _ = apply(**given, method="prefix")
        out |= {"prefix": prefix, "present": there, "mask": mask}
        place = jnp.cumsum(there, axis=1) - 1
        out["hidden"] = apply(prefix, mask, place, method=lambda net, *args: net.language(*args)[0])
        context = apply(**given, method="encode")
        for i, (keys, values) in enumerate(context[0]):
            out |= {f"keys_{i}": keys.swapaxes(1, 2), f"values_{i}": values.swapaxes(1, 2)}
        out["time"] = time_features(time, policy.spec.expert.width, 4e-3, 4.0)
        out["suffix"] = apply(context, noise, time, method="suffix")
        out["velocity"] = -apply(context, noise, time, method="velocity")
        spec = FlowSpec(network, CHUNK, noise.shape[-1], HeadConfig(num_steps=STEPS), 2)
        flow = FlowChunk(params, context, spec, noise.shape[:1])
        x = flow.from_noise(noise.reshape(len(noise), -1)).reshape(noise.shape)
        mixed = time[:, None, None] * noise[::-1] + (1.0 - time[:, None, None]) * noise
        velocity = -apply(context, mixed, time, method="velocity")
        out["loss"] = jnp.square(noise[::-1] - noise - velocity)
        action = flow.env_action(x.reshape(len(x), -1))
        return out | {"chunk": x, "action": action.reshape(len(x), CHUNK, -1)}

    given = {
        "pictures": (GIVEN["top"], GIVEN["wrist"]),
        "token": GIVEN["token"],
        "read": GIVEN["present"],
        "state": GIVEN["state"].astype(dtype),
    }
    typed = jax.tree.map(lambda x: np.asarray(x, dtype), params)
    return jax.jit(run)(typed, given, GIVEN["noise"].astype(dtype), GIVEN["time"].astype(dtype))


PARTS = {
    "picture": "pictures, scaled",
    "vision": "vision tower",
    "prefix": "prefix",
    "present": "presence and attention mask",
    "mask": "presence and attention mask",
    "hidden": "language model",
    "keys": "keys, turned, and values of each block",
    "values": "keys, turned, and values of each block",
    "time": "time",
    "suffix": "suffix with state and actions",
    "velocity": "velocity",
    "chunk": "chunk after all flow steps",
    "action": "chunk in the robot's units",
    "loss": "flow-matching loss",
}


def pairs(kind: str, dtype: str) -> Iterator[Pair]:
    """Compare with lerobot: where lerobot has an empty camera, ejax has nothing."""
    golden = load_golden(FILE)
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(dtype == "float64"):  # statistics in this type too
        policy = make(kind, path := write_folder(Path(folder) / kind, kind))
        out = blocks(policy, load(policy, path)[0], dtype)
    there = golden[f"{kind}/float64/present"]
    kept = there.any(axis=0) | (np.arange(there.shape[1]) >= there.shape[1] - LENGTH - (kind == "smolvla"))
    row = there[1:, kept]
    for name, x in out.items():
        key = f"{kind}/{dtype}/{name}"
        wanted = golden[key if key in golden else f"{kind}/float64/{name}"]
        x = np.asarray(x)[-len(wanted) :]
        if name.startswith("picture"):
            x = x.transpose(0, 3, 1, 2)
        elif name in ("present", "prefix"):
            wanted = wanted[:, kept]
        elif name == "hidden":  # tokens that nothing attends to are not the same
            x, wanted = x[row], wanted[:, kept][row]
        elif name == "mask":
            wanted = wanted[:, kept][:, :, kept]
            x = x & there[:, kept][:, :, None]
        elif name.startswith(("keys", "values")):
            x, wanted = x.swapaxes(1, 2)[row], wanted[:, :, kept].swapaxes(1, 2)[row]
        what = f"{kind}, {dtype}: {PARTS[name.partition('_')[0]]}"
        yield Pair(what, name, x, wanted, rtol=0.0, atol=1e-5 if dtype == "float32" else 1e-12)
