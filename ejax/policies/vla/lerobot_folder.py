"""A folder of LeRobot's or openpi's with pi0 or SmolVLA: its options, sizes, names, statistics and tokenizer.

config.json                  LeRobot's options; of openpi's ``action_horizon`` is read
model.safetensors            the weights; sizes are read from their shapes, so that small models load too
policy_preprocessor.json     LeRobot's statistics: it names the file; or norm_stats.json of openpi, also in assets/*/*/;
                             or buffers among the weights, as LeRobot had them up to 0.3
tokenizer.json               of PaliGemma or SmolVLM2, from their own repositories: neither of the two has it
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.numerics.text import as_text
from ejax.policies.pretrained.transformer import Stack
from ejax.policies.pretrained.weights import (
    WeightsError,
    find_weights,
    fit_weights,
    load_weights,
    renamed,
    weight_shapes,
)
from ejax.policies.vla.config import SizesConfig
from ejax.policies.vla.expert import ExpertSpec, Kind
from ejax.schema.frozen import freeze
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import expanded, read_text
from ejax.schema.tables import tables_beside
from ejax.types import Params

TABLES: dict[str, Any] = tables_beside(__file__)
NAMES: dict[str, str] = TABLES["read"]
_HEADS = re.compile(r"(.*)lm_head\.weight$")  # what a language model says; PaliGemma's is also the embedding of words
_BUFFERS = re.compile(r"^(?:un)?normalize_\w+?\.buffer_(\w+)\.(\w+)$")
_REFUSED = ("use_relative_actions", "adapt_to_pi_aloha", "use_delta_joint_actions_aloha", "add_image_special_tokens")


def _published(kind: Kind) -> ExpertSpec:
    given = TABLES["sizes"][kind].items()
    sizes: dict[str, Any] = {name: Stack(**freeze(x)) if isinstance(x, dict) else x for name, x in given}
    return ExpertSpec(kind, **sizes)


FULL: Mapping[Kind, ExpertSpec] = {kind: _published(kind) for kind in get_args(Kind)}
"""The published models: lerobot/pi0_base and lerobot/smolvla_base."""


def folder_kind(model_path: str | None) -> Kind | None:
    """Return which model the folder's ``config.json`` names; None: there is none, or it is of another."""
    file = None if model_path is None else Path(expanded(model_path)) / "config.json"
    kind = _read_json(file).get("type") if file is not None and file.is_file() else None
    return kind if kind in get_args(Kind) else None


def read_spec(kind: Kind, model_path: str | None) -> tuple[ExpertSpec, dict[str, Any]]:
    """Return the sizes of the folder's model, and its ``config.json``; of the published model for None.

    Raises WeightsError: nothing there to read, options that ejax has not, or sizes that do not fit each other.
    """
    if model_path is None:
        return FULL[kind], {}
    file = find_weights(model_path)
    config_file = file.parent / "config.json"
    options = _read_json(config_file) if config_file.is_file() else {}
    if options.get("type", kind) != kind:
        raise WeightsError(f"{config_file} is of '{options['type']}', not of {kind}; set policy.name to its type")
    if on := [name for name in _REFUSED if options.get(name)]:
        raise WeightsError(f"{config_file}: {', '.join(on)} is true, which ejax lacks; convert actions in the data")
    shapes = {renamed(name, NAMES): shape for name, shape in weight_shapes(file).items()}
    try:
        spec = _spec_of(kind, shapes, options)
    except (KeyError, ZeroDivisionError, TypeError) as error:
        text = f"{file} has no {error.args[0]}" if isinstance(error, KeyError) else f"{file}: {error}"
        raise WeightsError(f"{text}; it is not of {kind}, as LeRobot or openpi name its arrays") from error
    size = [spec.patch * spec.side] * 2
    for key in ("image_resolution", "resize_imgs_with_padding"):
        if options.get(key, size) != size:
            raise WeightsError(f"{config_file}: {key} is {options[key]}; ejax has the size of these weights, {size}")
    return spec, options


def made_spec(kind: Kind, sizes: SizesConfig, vocabulary: int) -> ExpertSpec:
    """Return sizes of a model that is made from nothing; ValueError for those that LeRobot's classes cannot have."""
    heads_of = "pi0's vision tower has 16 heads" if kind == "pi0" else "SmolVLM's heads have 64 numbers"
    each, names = (16, ("vision_width",)) if kind == "pi0" else (64, ("vision_width", "width"))
    for name in names:
        if getattr(sizes, name) % each:
            given = f"model_config.sizes.{name} is {getattr(sizes, name)}"
            raise ValueError(f"{given}; {heads_of}: use a multiple of {each}")
    if sizes.picture % sizes.patch or sizes.head_size % 2:
        text = f"patch {sizes.patch}, picture {sizes.picture}, head_size {sizes.head_size}"
        raise ValueError(f"model_config.sizes has {text}; let the first divide the second, and the third be even")
    heads, kv_heads, size = (8, 1, sizes.head_size) if kind == "pi0" else (sizes.width // 64, sizes.width // 64, 64)
    vision_heads = 16 if kind == "pi0" else sizes.vision_width // 64

    def stack(width: int, cross: tuple[int, ...] = ()) -> Stack:
        style: Any = "gemma" if kind == "pi0" else "llama"
        return Stack(style, width, sizes.depth, sizes.mlp_ratio * width, heads, kv_heads, size, cross)

    towers = sizes.vision_width, sizes.vision_depth, sizes.mlp_ratio * sizes.vision_width
    return replace(
        FULL[kind],
        vision=Stack("siglip", *towers, vision_heads, vision_heads, sizes.vision_width // vision_heads),
        language=stack(sizes.width),
        expert=stack(sizes.expert_width, () if kind == "pi0" else tuple(range(1, sizes.depth, 2))),
        patch=sizes.patch,
        side=sizes.picture // sizes.patch,
        shuffle=1,
        vocabulary=vocabulary,
    )


def _spec_of(kind: Kind, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> ExpertSpec:
    def stack(name: str, style: Any, heads: int | None, size: int | None) -> Stack:
        first = f"{name}.layers_0"
        (queries, width), keys = shapes[f"{first}.q.weight"], shapes[f"{first}.k.weight"][0]
        depth = len([each for each in shapes if re.fullmatch(rf"{name}\.layers_\d+\.q\.weight", each)])
        size = size or queries // (heads or 1)
        every = int(options.get("self_attn_every_n_layers", 2))
        alone = (kind, name) == ("smolvla", "expert") and "cross" in options.get("attention_mode", "cross_attn")
        cross = tuple(i for i in range(depth) if alone and (every <= 0 or i % every))
        inside = shapes[f"{first}.up.weight"][0]
        return Stack(style, width, depth, inside, queries // size, keys // size, size, cross)

    width, _, patch, _ = shapes["patches.weight"]
    style = "gemma" if kind == "pi0" else "llama"
    # heads are not seen in shapes: SigLIP's of 1152 has 16, others one for each 64 numbers; SmolLM2's have 64 numbers
    vision = stack("vision", "siglip", 16 if kind == "pi0" or width == FULL["pi0"].vision.width else width // 64, None)
    size = None if kind == "smolvla" else shapes["language.layers_0.k.weight"][0]  # Gemma's have one head of keys
    language, expert = (stack(name, style, None, size or 64) for name in ("language", "expert"))
    if (language.depth, language.kv_heads, language.head_size) != (expert.depth, expert.kv_heads, expert.head_size):
        raise TypeError(
            f"the expert has {expert.depth} blocks and the language model {language.depth}; ejax needs equal numbers"
        )
    features = {**options.get("input_features", {}), **options.get("output_features", {})}
    max_state, max_action = shapes["state_in.weight"][1], shapes["action_in.weight"][1]
    chunk = int(options.get("chunk_size", options.get("action_horizon", 50)))
    return ExpertSpec(
        kind,
        vision,
        language,
        expert,
        patch=patch,
        side=round(shapes["patches.place"][0] ** 0.5),
        shuffle=round((shapes["connector.weight"][1] / width) ** 0.5),
        vocabulary=shapes["words.weight"][0],
        chunk=chunk,
        max_state=max_state,
        max_action=max_action,
        periods=(options.get("min_period", 4e-3), options.get("max_period", 4.0)),
        state_dim=features.get("observation.state", {}).get("shape", [max_state])[0],
        action_dim=features.get("action", {}).get("shape", [max_action])[0],
        horizon=chunk,
    )


def load_folder(params: Params, kind: Kind, model_path: str, options: Mapping[str, Any]) -> tuple[Params, list[str]]:
    """Put the folder's weights and statistics into ``params``, arrays or shapes; return them with messages.

    Raises WeightsError for names or shapes that do not fit, all of them in one error.
    """
    flat = load_weights(model_path)
    buffers = {name: flat.pop(name) for name in list(flat) if _BUFFERS.match(name)}
    embedded = kind == "smolvla" or any(name.endswith("embed_tokens.weight") for name in flat)
    for name in [name for name in flat if _HEADS.match(name)]:
        if embedded or "gemma_expert" in name:
            del flat[name]
    fitted = fit_weights(params["params"], flat, NAMES, source=model_path)
    stats, where = _statistics(find_weights(model_path).parent, buffers)
    frozen, notes = dict(params["frozen"]), [f"the weights are those of {model_path}"]
    for name, mode in (("state", "STATE"), ("action", "ACTION")):
        size = frozen[f"{name}_shift"].shape[0]
        found = stats.get(name)
        if found is None:
            zero, one = jax.numpy.zeros(size), jax.numpy.ones(size)
            frozen |= {f"{name}_shift": zero, f"{name}_scale": one, f"{name}_offset": zero}
            notes.append(f"{model_path} has no statistics of the {name}: its numbers are the model's")
            continue
        units = affine(found, options.get("normalization_mapping", {}).get(mode, "MEAN_STD"), name == "state")
        if units["shift"].ndim != 1 or len(units["shift"]) < size:
            text = f"the {name} has {size} numbers, and statistics of {list(units['shift'].shape)}"
            raise WeightsError(f"{where}: {text}; those of another robot?")
        # openpi's have zeros behind those of the robot
        frozen |= {f"{name}_{part}": jax.numpy.asarray(x[:size], float) for part, x in units.items()}
        notes.append(f"the {name}'s statistics are those of {where}")
    return {"params": fitted, "frozen": frozen}, notes


def affine(stats: Mapping[str, Any], mode: str, into_model: bool) -> dict[str, NDArray[np.float64]]:
    """Return ``shift``, ``scale``, ``offset`` of x = shift + scale·(x' − offset), x' the model's, by LeRobot's mode.

    LeRobot adds 1e-8 to a deviation where it divides by it, not where it multiplies. WeightsError: unknown or missing.
    """
    ends = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
    wanted = ends.get(mode, ("mean", "std"))
    if mode not in (*ends, "MEAN_STD", "IDENTITY"):
        raise WeightsError(f"normalization_mapping has {mode}; ejax has MEAN_STD, IDENTITY, {', '.join(ends)}")
    if missing := [name for name in wanted if name not in stats]:
        raise WeightsError(f"{mode} needs the statistics {' and '.join(wanted)}; {missing[0]} is missing")
    shift, second = (np.asarray(stats[name], np.float64) for name in wanted)
    zero, one = np.zeros_like(shift), np.ones_like(shift)
    if mode == "IDENTITY":
        return {"shift": zero, "scale": one, "offset": zero}
    if mode == "MEAN_STD":
        return {"shift": shift, "scale": second + 1e-8 if into_model else second, "offset": zero}
    return {"shift": shift, "scale": np.where(second == shift, 1e-8, second - shift) / 2.0, "offset": -one}


def _statistics(folder: Path, buffers: Mapping[str, NDArray[Any]]) -> tuple[dict[str, dict[str, Any]], str]:
    """Return ``({"state" or "action": {statistic: numbers}}, where they are from)``."""
    found: dict[str, dict[str, Any]] = {}
    pipeline = folder / "policy_preprocessor.json"
    if pipeline.is_file():
        steps = _read_json(pipeline).get("steps", [])
        for step in [each for each in steps if each.get("registry_name") == "normalizer_processor"]:
            if step.get("state_file"):
                for name, x in load_weights(folder / str(step["state_file"])).items():
                    part, _, stat = name.rpartition(".")
                    found.setdefault(part.removeprefix("observation."), {})[stat] = x
                return found, str(folder / str(step["state_file"]))
    for file in (folder / "norm_stats.json", *sorted(folder.glob("assets/**/norm_stats.json"))):
        if file.is_file():
            given = _read_json(file)
            given = given.get("norm_stats", given)
            return {"state": given.get("state"), "action": given.get("actions")}, str(file)
    for name, x in buffers.items():
        part, stat = _BUFFERS.findall(name)[0]
        found.setdefault(part.removeprefix("observation_"), {})[stat] = x
    return found, "the weights' buffers"


@functools.cache
def tokenizer(folder: str, length: int) -> Callable[[str], tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Make a function from an instruction to ``(token int32 [length], read bool [length])``.

    A line's end is put behind it, and what is beyond ``length`` is cut, as LeRobot does. Raises WeightsError: there is
    no ``tokenizer.json``, or it cannot be read.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        text = "LeRobot takes it from google/paligemma-3b-pt-224 (pi0) or HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
        raise WeightsError(
            f"{folder} has no tokenizer.json, without which no instruction can be read; {text}: put it there"
        )
    try:
        from tokenizers import Tokenizer

        read = Tokenizer.from_str(read_text(file))
    except ImportError as error:
        raise WeightsError(f"{file} is read with tokenizers: pip install tokenizers ({error})") from error
    except Exception as error:  # tokenizers raises this class itself
        raise WeightsError(f"{file} is not a tokenizer: {error}") from error
    read.no_padding()
    read.no_truncation()

    @functools.lru_cache(maxsize=4096)
    def encode(text: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        ids = read.encode(text if text.endswith("\n") else f"{text}\n").ids[:length]
        token, there = np.zeros(length, np.int32), np.zeros(length, bool)
        token[: len(ids)], there[: len(ids)] = ids, True
        return token, there

    return encode


@functools.cache
def row_tokenizer(folder: str, length: int) -> Callable[..., tuple[NDArray[Any], NDArray[Any]]]:
    """Make ``tokenizer`` of many texts, uint8 [..., L]: a function for programs to call."""
    encode = tokenizer(folder, length)

    def rows(text: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        text = np.asarray(text)
        pairs = [encode(as_text(row)) for row in text.reshape(-1, text.shape[-1])]
        token, there = (np.stack(each).reshape(*text.shape[:-1], length) for each in zip(*pairs, strict=True))
        return token, there

    return rows


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(file))
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{file} must hold an object, got {short_repr(content)}")
    return content
