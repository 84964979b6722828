"""Make ``vla_models.npz``: small random pi0 and SmolVLA of lerobot's own classes, and all that they compute.

    python3.12 -m venv venv && venv/bin/pip install torch==2.13.0 torchvision==0.28.0 "transformers==5.5.4" \
        "draccus<0.12" einops gymnasium num2words opencv-python-headless accelerate scipy sentencepiece
    venv/bin/pip install --no-deps lerobot==0.6.1
    venv/bin/python tests/golden/make_vla_models.py

Weights are not stored: ``helpers/vla_model_inputs.py`` draws each from its name, here and in the test. Every number is
computed twice, as the classes do it, and in float64: for that the names of torch's float32 are bound to float64 before
anything is made, because the classes convert to float32 in many places.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from vla_model_inputs import CHUNK, STEPS, inputs, weight

LAYERS = 2
VISION = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": LAYERS, "patch_size": 4}
FEATURES = {
    "observation.images.top": ("VISUAL", (3, 12, 16)),
    "observation.images.wrist": ("VISUAL", (3, 8, 8)),
    "observation.images.empty": ("VISUAL", (3, 8, 8)),
    "observation.state": ("STATE", (3,)),
}


def main() -> None:
    """Compute each model in float32, and in float64 in its own process."""
    if len(sys.argv) > 1:
        compute(sys.argv[1], Path(sys.argv[2]))
        return
    import subprocess

    stored: dict[str, np.ndarray] = {}
    for dtype in ("float32", "float64"):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "part.npz"
            subprocess.run([sys.executable, __file__, dtype, str(file)], check=True)
            stored |= dict(np.load(file))
    target = Path(__file__).with_name("vla_models.npz")
    np.savez_compressed(target, **stored)
    print(target, f"{target.stat().st_size / 1024:.0f} KiB")


def compute(dtype: str, file: Path) -> None:
    """Run both models in one type."""
    import torch

    if dtype == "float64":
        torch.float32 = torch.float = torch.float64
        torch.Tensor.float = torch.Tensor.double
        torch.set_default_dtype(torch.float64)
    import lerobot
    import transformers

    versions = {"lerobot": lerobot.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    stored = {"versions": np.array(json.dumps(versions))}
    for kind, make in (("pi0", make_pi0), ("smolvla", make_smolvla)):
        policy = make()
        state = policy.state_dict()
        with torch.no_grad():
            for name, x in state.items():
                x.copy_(torch.from_numpy(weight(f"{kind}/{name}", tuple(x.shape))))
        for name, x in run(kind, policy).items():
            if dtype == "float64" or x.size < 200:
                stored[f"{kind}/{dtype}/{name}"] = x
        shapes = {name: list(x.shape) for name, x in state.items()}
        stored[f"{kind}/shapes"] = np.array(json.dumps(shapes))
        stored[f"{kind}/config"] = np.array(json.dumps(config_json(policy)))
    np.savez(file, **stored)


def config_json(policy) -> dict:
    """Return the ``config.json`` that lerobot itself writes."""
    with tempfile.TemporaryDirectory() as folder:
        policy.config._save_pretrained(Path(folder))
        return json.loads((Path(folder) / "config.json").read_text())


def features():
    """Return lerobot's input and output features."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    given = {name: PolicyFeature(FeatureType[kind], shape) for name, (kind, shape) in FEATURES.items()}
    return {"input_features": given, "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))}}


def make_pi0():
    """Make lerobot's ``PI0Policy`` of 8 heads, as its code demands, and small in all else."""
    from lerobot.policies.pi0 import modeling_pi0 as module
    from lerobot.policies.pi0.configuration_pi0 import PI0Config

    sizes = {"gemma_2b": (16, 24), "gemma_300m": (8, 20)}
    module.get_gemma_config = lambda name: module.GemmaConfig(
        width=sizes[name][0], depth=LAYERS, mlp_dim=sizes[name][1], num_heads=8, num_kv_heads=1, head_dim=4
    )
    whole, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def shrunk(config):
        config.text_config.vocab_size = 40
        for name, value in {**VISION, "projection_dim": 16}.items():
            setattr(config.vision_config, name, value)
        return whole(config)

    def shrunk_expert(config):
        config.vocab_size = 40
        return expert(config)

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = shrunk, shrunk_expert
    options = {"chunk_size": CHUNK, "n_action_steps": CHUNK, "max_state_dim": 5, "max_action_dim": 6}
    config = PI0Config(num_inference_steps=STEPS, image_resolution=(16, 16), device="cpu", **options, **features())
    policy = module.PI0Policy(config)
    return policy.to(next_dtype()).eval()


def make_smolvla():
    """Make lerobot's ``SmolVLAPolicy`` around a small SmolVLM with heads of 64 numbers, as SmolLM2 has them."""
    from lerobot.policies.smolvla import smolvlm_with_expert as module
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from transformers import SmolVLMConfig

    text = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS + 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 40, "rms_norm_eps": 1e-5}
    vision = {**VISION, "hidden_size": 128, "num_attention_heads": 2, "image_size": 16}
    config = SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2, pad_token_id=0, image_token_id=39)
    tokenizer = SimpleNamespace(fake_image_token_id=37, global_image_token_id=38)
    module.AutoConfig = SimpleNamespace(from_pretrained=lambda name: config)
    module.AutoProcessor = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(tokenizer=tokenizer))
    module.get_intermediate_size = lambda width: 20
    options = {"chunk_size": CHUNK, "n_action_steps": CHUNK, "max_state_dim": 5, "max_action_dim": 6}
    options |= {"num_steps": STEPS, "resize_imgs_with_padding": (16, 16), "num_vlm_layers": LAYERS, "device": "cpu"}
    policy = SmolVLAPolicy(SmolVLAConfig(empty_cameras=1, **options, **features()))
    return policy.to(next_dtype()).eval()


def next_dtype():
    """Return the type that this process computes in."""
    import torch

    return torch.get_default_dtype()


def run(kind: str, policy) -> dict[str, np.ndarray]:
    """Compute every block of a model for ``inputs()``."""
    import torch
    from lerobot.configs.types import FeatureType, NormalizationMode
    from lerobot.policies.common import vla_utils
    from lerobot.processor.normalize_processor import NormalizerProcessorStep, UnnormalizerProcessorStep

    given, dtype, model = inputs(), next_dtype(), policy.model
    modes = {FeatureType[key]: NormalizationMode.MEAN_STD for key in ("STATE", "ACTION")}
    stats: dict[str, dict[str, torch.Tensor]] = {}
    for name in [name for name in given if name.startswith("stats/")]:
        part, _, stat = name.removeprefix("stats/").rpartition(".")
        stats.setdefault(part, {})[stat] = torch.tensor(given[name]).to(dtype)
    everything = {**policy.config.input_features, **policy.config.output_features}
    step = NormalizerProcessorStep(features=everything, norm_map=modes, stats=stats, dtype=dtype)
    back = UnnormalizerProcessorStep(features=everything, norm_map=modes, stats=stats, dtype=dtype)
    batch = {"observation.state": torch.tensor(given["state"]).to(dtype)}
    batch = step._normalize_observation(batch, inverse=False)
    out = {"state": batch["observation.state"]}
    for name in ("top", "wrist"):
        picture = torch.tensor(given[name]).permute(0, 3, 1, 2).to(dtype) / 255.0
        batch[f"observation.images.{name}"] = picture
    prepare = policy._preprocess_images if kind == "pi0" else policy.prepare_images
    images, image_masks = prepare(batch)
    assert [bool(mask.all()) for mask in image_masks] == [True, True, False]
    token, present = torch.tensor(given["token"]), torch.tensor(given["present"])
    state, noise, time = (
        policy.prepare_state(batch),
        torch.tensor(given["noise"]).to(dtype),
        torch.tensor(given["time"]),
    )
    time = time.to(dtype)
    out |= {"picture_top": images[0], "picture_wrist": images[1]}
    with torch.no_grad():
        if kind == "pi0":
            tower = model.paligemma_with_expert
            vision = tower.paligemma.model.vision_tower(images[0]).last_hidden_state
            prefix, there, blocks = model.embed_prefix(images, image_masks, token, present)
            suffix, *_ = model.embed_suffix(state, noise, time)
            mask, width = vla_utils.make_att_2d_masks(there, blocks), model.action_in_proj.out_features
            four = vla_utils.prepare_attention_masks_4d(mask)
            tower.paligemma.model.language_model.config._attn_implementation = "eager"
            (hidden, _), cache = tower.forward(
                attention_mask=four,
                position_ids=torch.cumsum(there, dim=1) - 1,
                inputs_embeds=[prefix, None],
                use_cache=True,
            )
            velocity = model.denoise_step(state, there, cache, noise, time)
        else:
            tower = model.vlm_with_expert
            vision = tower.get_vlm_model().vision_model(pixel_values=images[0]).last_hidden_state
            prefix, there, blocks = model.embed_prefix(images, image_masks, token, present, state=state)
            suffix, *_ = model.embed_suffix(noise, time)
            mask, width = vla_utils.make_att_2d_masks(there, blocks), tower.expert_hidden_size
            (hidden, _), cache = tower.forward(
                attention_mask=mask,
                position_ids=torch.cumsum(there, dim=1) - 1,
                inputs_embeds=[prefix, None],
                use_cache=True,
            )
            velocity = model.denoise_step(there, cache, noise, time)
        embedded = vla_utils.create_sinusoidal_pos_embedding(time, width, 4e-3, 4.0, device=time.device)
        chunk = model.sample_actions(images, image_masks, token, present, state, noise=noise)
        action = torch.tensor(given["noise"]).to(dtype)
        loss = model.forward(images, image_masks, token, present, state, action, noise.flip(0), time)
    out |= {"vision": vision, "prefix": prefix, "present": there, "mask": mask, "hidden": hidden}
    out |= {"suffix": suffix, "time": embedded.to(dtype), "velocity": velocity, "chunk": chunk, "loss": loss}
    for i, layer in enumerate(cache):
        out |= {f"keys_{i}": layer[0], f"values_{i}": layer[1]}
    out["action"] = back._normalize_action(chunk[..., :2], inverse=True)
    big = ("vision", "hidden", "prefix", "keys_0", "keys_1", "values_0", "values_1")
    return {name: x[1:].numpy() if name in big else x.numpy() for name, x in out.items()}  # the row with padding


if __name__ == "__main__":
    main()
