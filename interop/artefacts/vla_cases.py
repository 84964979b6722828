"""The observations that an export of a vision-language-action policy is checked on, and JAX's answers to them.

As ``interop.artefacts.cases``, with the environment's texts in ``environment``, ``huge``, ``not_a_number`` and
``noise``, and others in ``edges``; ``zeros`` has none. Two more have the environment's pictures and numbers:

    texts       adversarial texts, see ``interop.artefacts.texts``
    sampled     the environment's texts; the flow starts from N(0, 1), where it starts from 0 in all others but
                ``edges`` (0 or ±4 for each number)

The answers are those of the policy as it was trained, to the bytes of the text: with its adapters beside its weights,
and its own tokenizer. An artefact is given tokens, and has the adapters merged.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.policies.vla.policy import VLAPolicy
from ejax.policies.vla.words import Words
from ejax.types import Array, Params
from interop.artefacts.adversaries import adversarial_observations
from interop.artefacts.cases import answer, feature_ranges
from interop.artefacts.parity import Arrays, Case
from interop.artefacts.texts import adversarial_texts, texts_document
from interop.twin.text import Tokenizer
from interop.twin.vla_spec import NOISE, TEXTS, TOKENIZER, TOKENS, VLASpec

_NUM_ROWS = 64
"""Rows of each of the two further kinds."""
_MAX_TEXTS = 64
"""Texts of the environment's, in texts.json."""
_FAR = 4.0


class _Tokens(Words):
    """The tokenizer of a policy that is given tokens."""

    def tokens_of(self, text: Array) -> Array:
        return text


def of_tokens(policy: VLAPolicy) -> Any:
    """The policy of merged weights, without a critic, whose text is tokens already, int32 [..., max_words]."""
    words = _Tokens(policy.words.vocabulary, policy.words.max_words)
    model = policy.model.model_copy(update={"critic": False, "lora": None})
    return replace(policy, model=model, words=words, instruction=None)


def in_float32(policy: VLAPolicy) -> Any:
    """The policy with products of float32, which is what is exported."""
    return replace(policy, model=policy.model.model_copy(update={"torch_dtype": "float32"}))


def draw_vla_cases(
    policy: VLAPolicy, params: Params, spec: VLASpec, seen: Arrays, space: gymnasium.Space
) -> list[Case]:
    """
    Args:
        seen: observations of the environment by path, [B, ...] each: images and text uint8.
        space: of the observation; its finite bounds are edges too.
    """
    rng = np.random.default_rng(2)
    parts = {name: seen[name] for name in (*spec.images, *spec.observation)}
    own = _texts(policy, seen)
    observations = {"environment": parts}
    observations |= adversarial_observations(parts, feature_ranges(parts, space, spec), spec)
    some = {name: np.take(x, np.arange(_NUM_ROWS), axis=0, mode="wrap") for name, x in parts.items()}
    observations |= {"texts": some, "sampled": some} if spec.head == "flow" else {"texts": some}
    adversarial = adversarial_texts(policy.words.vocabulary, policy.words.max_words)
    sentences, noise = [], []
    for name, obs in observations.items():
        rows = len(next(iter(obs.values())))
        texts = {"edges": adversarial[::-1], "texts": adversarial, "zeros": [b""]}.get(name, own)
        sentences += [texts[i % len(texts)] for i in range(rows)]
        shape = (rows, spec.sizes[0])
        starts = {"sampled": rng.normal(size=shape), "edges": rng.choice((-_FAR, 0.0, _FAR), shape)}
        noise.append(starts.get(name, np.zeros(shape)).astype(np.float32))
    together = {name: np.concatenate([obs[name] for obs in observations.values()]) for name in parts}
    given = {**together, spec.text: _padded(sentences)}
    if spec.head == "flow":
        given[NOISE] = np.concatenate(noise)
    instructed: Any = replace(policy, instruction=None)
    expected, allowed = answer(instructed, params, spec, given)
    tokenizer = Tokenizer.from_json(policy.words.to_json())
    given[TOKENS] = np.stack([tokenizer.encode(text) for text in sentences])
    ends = np.cumsum([len(next(iter(obs.values()))) for obs in observations.values()])
    mine = {name: given[name] for name in spec.inputs}

    def cut(arrays: Arrays, i: int) -> Arrays:
        return {name: np.split(x, ends)[i] for name, x in arrays.items()}

    return [Case(name, cut(mine, i), cut(expected, i), cut(allowed, i)) for i, name in enumerate(observations)]


def text_documents(policy: VLAPolicy, seen: Arrays) -> dict[str, Any]:
    """``tokenizer.json``, and ``texts.json`` with JAX's tokens."""
    own = sorted(set(_texts(policy, seen)))[:_MAX_TEXTS]
    texts = [*own, *adversarial_texts(policy.words.vocabulary, policy.words.max_words)]
    tokens = np.asarray(policy.words.tokens_of(jnp.asarray(_padded(texts))))
    return {TOKENIZER: policy.words.to_json(), TEXTS: texts_document(texts, tokens)}


def _texts(policy: VLAPolicy, seen: Arrays) -> list[bytes]:
    """The environment's texts, row by row, or the policy's one."""
    if policy.instruction is not None:
        return [bytes(policy.instruction)]
    return [row.tobytes().rstrip(b"\0") for row in seen[policy.model.text]]


def _padded(texts: Sequence[bytes]) -> NDArray[np.uint8]:
    """[len(texts), L], zeros behind each."""
    length = max(len(text) for text in texts) + 1
    return np.frombuffer(b"".join(text.ljust(length, b"\0") for text in texts), np.uint8).reshape(len(texts), length)
