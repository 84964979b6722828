"""MiniLM with random weights, against loops in NumPy; with real ones: test_interop_pretrained.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.policies.pretrained.minilm import MiniLM
from ejax.types import Params

TINY = MiniLM(vocabulary=11, positions=6, features=8, layers=2, heads=2, inside=12)
TOKEN = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 0, 0, 0]], np.int32)
VALID = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], bool)


@pytest.fixture(scope="module")
def params() -> Params:
    drawn = jax.jit(TINY.init)(jax.random.key(0), TOKEN, VALID)
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), drawn)


def dense(x: np.ndarray, layer: Params) -> np.ndarray:
    return x @ layer["kernel"] + layer["bias"]


def normalized(x: np.ndarray, layer: Params) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * layer["scale"] + layer["bias"]


def reference(p: Params, tokens: np.ndarray) -> np.ndarray:
    """One sentence without padding, token by token and head by head."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    words, places, kinds = (p[name]["embedding"] for name in ("word", "position", "token_type"))
    x = normalized(np.stack([words[t] + places[i] + kinds[0] for i, t in enumerate(tokens)]), p["norm"])
    for i in range(2):
        layer = p[f"layer_{i}"]
        query, key, value = (dense(x, layer[name]) for name in ("query", "key", "value"))
        attended = np.zeros_like(x)
        for head in (slice(0, 4), slice(4, 8)):
            for q in range(len(tokens)):
                weight = np.array([math.exp(query[q, head] @ key[k, head] / math.sqrt(4)) for k in range(len(tokens))])
                attended[q, head] = weight / weight.sum() @ value[:, head]
        x = normalized(x + dense(attended, layer["attended"]), layer["norm_attended"])
        up = dense(x, layer["up"])
        gelu = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
        x = normalized(x + dense(gelu, layer["down"]), layer["norm"])
    return x.mean(0) / np.linalg.norm(x.mean(0))


@pytest.mark.slow
def test_an_embedding_is_that_of_berts_formulas(params: Params) -> None:
    got = TINY.apply(params, TOKEN, VALID)
    wanted = [reference(params["params"], tokens[valid].tolist()) for tokens, valid in zip(TOKEN, VALID, strict=True)]
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.slow
def test_padding_is_not_read(params: Params) -> None:
    other = np.where(VALID, TOKEN, 7)
    assert np.array_equal(TINY.apply(params, TOKEN, VALID), TINY.apply(params, other, VALID))


@pytest.mark.slow
def test_an_embedding_has_length_one(params: Params) -> None:
    np.testing.assert_allclose(jnp.linalg.norm(TINY.apply(params, TOKEN, VALID), axis=-1), 1.0, rtol=1e-5)


@pytest.mark.slow
def test_leading_axes_are_kept(params: Params) -> None:
    got = TINY.apply(params, TOKEN.reshape(2, 1, 6), VALID.reshape(2, 1, 6))
    np.testing.assert_allclose(got[:, 0], TINY.apply(params, TOKEN, VALID), atol=1e-6)


@pytest.mark.slow
def test_a_sentence_without_tokens_gives_numbers(params: Params) -> None:
    assert np.array_equal(TINY.apply(params, TOKEN[:1], np.zeros((1, 6), bool)), np.zeros((1, 8)))


def test_a_sentence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 6 tokens, got 7"):
        jax.eval_shape(TINY.init, jax.random.key(0), np.zeros(7, int), np.ones(7, bool))


@pytest.mark.slow
def test_the_model_has_as_many_parameters_as_published() -> None:
    shapes = jax.eval_shape(MiniLM().init, jax.random.key(0), TOKEN, VALID)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 22_713_216 - (384 * 384 + 384)  # without the pooler
