"""``ejax export RUN --formats lerobot``: a policy of the field's as the folder that LeRobot itself would write.

    config.json, model.safetensors                       options, weights; adapters are merged into them
    policy_preprocessor.json, policy_postprocessor.json  LeRobot's pipelines, each with its statistics
    tokenizer.json, tokenizer_config.json                those of the source's folder, or of a model made from nothing
    observations.npz                                     observations, and JAX's chunks of zero noise

A folder that the policy was read from gives its other options, its tokenizer, and the weights that no action reads.
"""

import json
import re
import string
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ejax.envs.description import describe
from ejax.numerics.text import as_bytes
from ejax.policies.observations import flatten_observation
from ejax.policies.pretrained.weights import find_weights, load_weights
from ejax.policies.vla.expert import ExpertSpec, Kind
from ejax.policies.vla.lerobot_folder import TABLES, read_spec
from ejax.policies.vla.lerobot_policy import LeRobotPolicy, open_folder
from ejax.policies.vla.words import PADDING, UNKNOWN, Words
from ejax.schema.plain_files import read_bytes, to_json
from ejax.schema.writing import make_folder, move, new_file, replace_file, sync
from ejax.training.environments import sample_obs
from ejax.types import Env, HostEnv, Params

_ROWS = 4
_MODES = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}


def export_lerobot(policy: Any, params: Params, env: Env | HostEnv, to: Path) -> dict[str, Any]:
    """Write the folder ``to``, which appears only if ejax reads the same weights and units out of it; return their
    count.

    Raises:
        ValueError: another policy than pi0 or SmolVLA; units of another kind than mean and deviation.
        FileExistsError: ``to`` holds files already.
    """
    if not isinstance(policy, LeRobotPolicy):
        raise ValueError(f"the format lerobot is for pi0 and smolvla, got {type(policy).__name__}; leave it out")
    if to.is_symlink() or (to.exists() and any(to.iterdir())):
        raise FileExistsError(f"{to} is a link or holds files already; choose a new folder")
    merged, obs = policy.merge(params), sample_obs(env, 1)
    with tempfile.TemporaryDirectory(dir=make_folder(to.parent), prefix=f".partial-{to.name}-") as scratch:
        made = make_folder(Path(scratch) / "export")
        config = _write_config(made, policy, obs)
        save_file(lerobot_weights(policy, merged), made / "model.safetensors")
        _write_pipelines(made, policy, merged["frozen"], config)
        _write_tokenizer(made, policy)
        for file in made.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors makes files for their owner alone
        again = open_folder(made)[1]
        for name, x in traverse_util.flatten_dict({part: again[part] for part in ("params", "frozen")}).items():
            mine: Any = merged
            for part in name:
                mine = mine[part]
            if not np.allclose(mine, x, rtol=1e-6, atol=1e-7):  # a deviation that is divided by has 1e-8 more
                raise ValueError(f"{'.'.join(name)} is not what was written; the folder is left out")
        _write_answers(made, policy, params, env)
        if to.exists():
            to.rmdir()
        sync(made)
        move(made, to)
    return {"weights": sum(x.size for x in jax.tree.leaves(again["params"]))}


def lerobot_weights(policy: LeRobotPolicy, merged: Params) -> dict[str, NDArray[Any]]:
    """Name and lay out all weights as LeRobot's class has them."""
    kind = policy.spec.kind
    flat = traverse_util.flatten_dict(merged["params"], sep=".")
    weights = {lerobot_name(kind, name): _in_torch(name, x) for name, x in flat.items() if name[:7] != "critic."}
    words = weights[lerobot_name(kind, "words.embedding")]
    found = {} if policy.folder is None else load_weights(policy.folder)
    for name in TABLES["heads"][kind]:
        width = policy.spec.expert.width if "gemma_expert" in name else words.shape[1]
        weights[name] = found.get(name, np.zeros((len(words), width), np.float32))
    if kind == "pi0":
        weights[TABLES["heads"][kind][0]] = words.copy()
    return weights


def lerobot_name(kind: Kind, leaf: str) -> str:
    """Return LeRobot's name of ``leaf`` of an ``ExpertNetwork``."""
    for pattern, replacement in TABLES["write"].items():
        leaf = re.sub(pattern, replacement, leaf)
    part, _, inside = leaf.partition(".")
    roots: dict[str, str] = TABLES["roots"][kind]
    return roots.get(part, f"{part}.") + inside


def _in_torch(leaf: str, x: Any) -> NDArray[Any]:
    """Turn a kernel, [*window, in, out], into [out, in, *window]."""
    x = np.asarray(x)
    axes = (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2)) if leaf.endswith("kernel") else range(x.ndim)
    return np.ascontiguousarray(x.transpose(axes))


def _write_config(folder: Path, policy: LeRobotPolicy, obs: Any) -> dict[str, Any]:
    spec, cameras = policy.spec, {}
    for name in policy.images:
        height, width, depth = obs[name].shape[1:]
        cameras[f"observation.images.{name}"] = {"type": "VISUAL", "shape": [depth, height, width]}
    state = {"observation.state": {"type": "STATE", "shape": [spec.state_dim]}}
    config: dict[str, Any] = _made_options(spec, policy) if policy.folder is None else _options(policy)
    config |= {"input_features": {**cameras, **state}, "n_action_steps": spec.horizon, "normalization_mapping": _MODES}
    config["output_features"] = {"action": {"type": "ACTION", "shape": [spec.action_dim]}}
    replace_file(folder / "config.json", to_json(config, indent=2))
    return config


def _options(policy: LeRobotPolicy) -> dict[str, Any]:
    return {"type": policy.spec.kind, **read_spec(policy.spec.kind, policy.folder)[1]}


def _made_options(spec: ExpertSpec, policy: LeRobotPolicy) -> dict[str, Any]:
    size = [spec.patch * spec.side] * 2
    options: dict[str, Any] = {
        "type": spec.kind,
        "chunk_size": spec.chunk,
        "max_state_dim": spec.max_state,
        "max_action_dim": spec.max_action,
        "min_period": spec.periods[0],
        "max_period": spec.periods[1],
        "tokenizer_max_length": policy.tokens,
    }
    if spec.kind == "pi0":
        return options | {"num_inference_steps": policy.head.num_steps, "image_resolution": size}
    options |= {"num_steps": policy.head.num_steps, "resize_imgs_with_padding": size, "load_vlm_weights": False}
    width = spec.expert.width / spec.language.width
    return options | {"num_vlm_layers": spec.language.depth, "expert_width_multiplier": width}


def _write_pipelines(folder: Path, policy: LeRobotPolicy, units: Params, config: Mapping[str, Any]) -> None:
    kind, stats = policy.spec.kind, dict[str, NDArray[Any]]()
    for name, feature in (("state", "observation.state"), ("action", "action")):
        if np.any(np.asarray(units[f"{name}_offset"])):
            text = f"the {name} is normalized by its extremes, and an export has mean and deviation"
            raise ValueError(f"{text}: clone with model_config.statistics: demonstrations")
        stats[f"{feature}.mean"] = np.asarray(units[f"{name}_shift"])
        stats[f"{feature}.std"] = np.asarray(units[f"{name}_scale"])
    features = {**config["input_features"], **config["output_features"]}
    norm = {"eps": 1e-8, "features": features, "norm_map": _MODES}
    newline = "pi0_new_line_processor" if kind == "pi0" else "smolvla_new_line_processor"
    padding = "max_length" if kind == "pi0" else config.get("pad_language_to", "longest")
    published = {"pi0": "google/paligemma-3b-pt-224", "smolvla": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"}
    name = "." if policy.folder is None else config.get("vlm_model_name", published[kind])
    tokens = {"max_length": policy.tokens, "task_key": "task", "padding_side": "right", "padding": padding}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    before: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": newline, "config": {}},
        {"registry_name": "tokenizer_processor", "config": {**tokens, "truncation": True, "tokenizer_name": name}},
        device,
        {"registry_name": "normalizer_processor", "config": norm},
    ]
    after = [
        {"registry_name": "unnormalizer_processor", "config": {**norm, "features": config["output_features"]}},
        device,
    ]
    for pipeline, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        for i, step in enumerate(steps):
            if "normalizer" in step["registry_name"]:
                step["state_file"] = f"{pipeline}_step_{i}_{step['registry_name']}.safetensors"
                save_file(stats, folder / step["state_file"])
        replace_file(folder / f"{pipeline}.json", to_json({"name": pipeline, "steps": steps}, indent=2))


def _write_tokenizer(folder: Path, policy: LeRobotPolicy) -> None:
    if policy.words is not None:
        replace_file(folder / "tokenizer.json", tokenizer_json(policy.words))
        made = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>"}
        replace_file(folder / "tokenizer_config.json", to_json(made, indent=2))
        return
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        source = find_weights(str(policy.folder)).parent / name
        if source.is_file():
            replace_file(folder / name, read_bytes(source))


def tokenizer_json(words: Words) -> str:
    """Write ``words`` as a tokenizer of the package ``tokenizers``: the same tokens, without padding."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    special = {"<pad>": PADDING, "<unk>": UNKNOWN}
    numbers = {word: UNKNOWN + 1 + i for i, word in enumerate(words.vocabulary)}
    made = Tokenizer(models.WordLevel({**special, **numbers}, unk_token="<unk>"))
    # not Lowercase, which changes letters beyond ASCII too
    made.normalizer = normalizers.Sequence([normalizers.Replace(x, x.lower()) for x in string.ascii_uppercase])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\x00-/:-`{-\x7f]+"), "removed")
    made.add_special_tokens([AddedToken(each, special=True) for each in special])
    return json.dumps(json.loads(made.to_str()), indent=1, ensure_ascii=False)


def _write_answers(folder: Path, policy: LeRobotPolicy, params: Params, env: Env | HostEnv) -> None:
    draw, obs = np.random.default_rng(0), dict(sample_obs(env, _ROWS))
    for name, x in obs.items():
        if name in policy.images:
            obs[name] = draw.integers(0, 256, x.shape, np.uint8)
        elif name in policy.numbers:
            obs[name] = draw.normal(size=x.shape).astype(np.float32)
    given = {f"observation.images.{name}": obs[name] for name in policy.images}
    given["observation.state"] = np.asarray(flatten_observation({name: obs[name] for name in policy.numbers}))
    if policy.text is not None:
        texts = describe(env).instructions or ("",)
        given["task"] = np.array([texts[i % len(texts)] for i in range(_ROWS)])
        obs[policy.text] = np.stack([as_bytes(text, obs[policy.text].shape[-1]) for text in given["task"]])
    action = jax.jit(lambda *given: policy.apply(*given)[0].mode())(params, obs)
    with new_file(folder / "observations.npz") as file:
        np.savez_compressed(file, **given, action=np.asarray(action))
