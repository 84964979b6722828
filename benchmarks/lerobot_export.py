"""Load an export of ``ejax export RUN --formats lerobot`` strictly by lerobot, and compare actions.

    python3.12 benchmarks/lerobot_export.py FOLDER

with the packages of ``tests/golden/make_vla_models.py``. Everything comes from the folder: options, weights, pipelines
with their statistics, tokenizer, observations and ejax's answers. lerobot's pi0 knows two sizes of Gemma and one of
SigLIP alone: those of a small model are put in their place, as the weights' shapes have them.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def main() -> None:
    """Print the largest difference, in the robot's units."""
    folder = Path(sys.argv[1])
    config = json.loads((folder / "config.json").read_text())
    import torch
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    policy = {"pi0": _pi0, "smolvla": _smolvla}[config["type"]](folder, shapes)
    from safetensors.torch import load_file

    policy.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    policy.eval()
    from lerobot.policies.factory import make_pre_post_processors

    overrides = {"tokenizer_processor": {"tokenizer_name": str(folder)}}
    before, after = make_pre_post_processors(policy.config, str(folder), preprocessor_overrides=overrides)
    given, largest = np.load(folder / "observations.npz"), 0.0
    for i in range(len(given["action"])):
        one: dict[str, Any] = {"task": str(given["task"][i])}
        for name in given.files:
            if name.startswith("observation.images."):
                one[name] = torch.tensor(given[name][i]).permute(2, 0, 1).float() / 255.0
        one["observation.state"] = torch.tensor(given["observation.state"][i])
        noise = torch.zeros(1, policy.config.chunk_size, policy.config.max_action_dim)
        with torch.no_grad():
            chunk = policy.predict_action_chunk(before(one), noise=noise)
        chunk = after(chunk)[0, : policy.config.n_action_steps].numpy()
        largest = max(largest, float(np.abs(chunk.reshape(-1) - given["action"][i]).max()))
    scale = float(np.abs(given["action"]).max())
    print(
        f"{config['type']}: {len(shapes)} arrays loaded strictly; actions of up to {scale:.3g} differ by {largest:.2g}"
    )


def _depth(shapes: dict[str, tuple[int, ...]], part: str) -> int:
    return len([name for name in shapes if part in name and name.endswith("self_attn.q_proj.weight")])


def _pi0(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Any:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.pi0 import modeling_pi0 as module

    names = {"gemma_2b": "language_model.", "gemma_300m": "gemma_expert.model."}

    def size_of(variant: str) -> Any:
        part = names[variant]
        first = {name.partition(part)[2]: shape for name, shape in shapes.items() if f"{part}layers.0." in name}
        (mlp, width), keys = first["layers.0.mlp.up_proj.weight"], first["layers.0.self_attn.k_proj.weight"][0]
        depth = _depth(shapes, part)
        sizes = {"num_heads": 8, "num_kv_heads": 1, "head_dim": keys}
        return module.GemmaConfig(width=width, depth=depth, mlp_dim=mlp, **sizes)

    module.get_gemma_config = size_of
    vision = {name.rpartition("vision_model.")[2]: shape for name, shape in shapes.items() if "vision_model" in name}
    width, _, patch, _ = vision["embeddings.patch_embedding.weight"]
    vocabulary, language = next(x for name, x in shapes.items() if name.endswith("embed_tokens.weight"))
    whole, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def shrunk(config: Any) -> Any:
        config.text_config.vocab_size = vocabulary
        small = config.vision_config
        small.hidden_size, small.intermediate_size = width, vision["encoder.layers.0.mlp.fc1.weight"][0]
        small.num_hidden_layers, small.patch_size, small.projection_dim = _depth(shapes, "vision_"), patch, language
        return whole(config)

    def shrunk_expert(config: Any) -> Any:
        config.vocab_size = vocabulary
        return expert(config)

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = shrunk, shrunk_expert
    return module.PI0Policy(PreTrainedConfig.from_pretrained(folder))


def _smolvla(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Any:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.smolvla import smolvlm_with_expert as module
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from transformers import SmolVLMConfig

    def shape(ending: str) -> tuple[int, ...]:
        return next(x for name, x in shapes.items() if name.endswith(ending))

    (vocabulary, width), (vision, _, patch, _) = shape("embed_tokens.weight"), shape("patch_embedding.weight")
    heads, keys = (shape(f"text_model.layers.0.self_attn.{name}_proj.weight")[0] // 64 for name in "qk")
    text = {"model_type": "llama", "hidden_size": width, "head_dim": 64, "vocab_size": vocabulary}
    text |= {"num_attention_heads": heads, "num_key_value_heads": keys, "pad_token_id": 0}
    text |= {"intermediate_size": shape("text_model.layers.0.mlp.up_proj.weight")[0]}
    text |= {"num_hidden_layers": _depth(shapes, "text_model.")}
    side = round(shape("position_embedding.weight")[0] ** 0.5) * patch
    seen = {"hidden_size": vision, "intermediate_size": shape("vision_model.encoder.layers.0.mlp.fc1.weight")[0]}
    seen |= {"num_hidden_layers": _depth(shapes, "vision_model."), "patch_size": patch, "image_size": side}
    seen |= {"num_attention_heads": vision // 64}
    scale = round((shape("modality_projection.proj.weight")[1] / vision) ** 0.5)
    config = SmolVLMConfig(text_config=text, vision_config=seen, scale_factor=scale, pad_token_id=0, image_token_id=1)
    module.AutoConfig = SimpleNamespace(from_pretrained=lambda name: config)
    tokenizer = SimpleNamespace(fake_image_token_id=0, global_image_token_id=0)
    module.AutoProcessor = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(tokenizer=tokenizer))
    inside = shape("lm_expert.layers.0.mlp.up_proj.weight")[0]
    module.get_intermediate_size = lambda width: inside
    return SmolVLAPolicy(PreTrainedConfig.from_pretrained(folder))


if __name__ == "__main__":
    main()
