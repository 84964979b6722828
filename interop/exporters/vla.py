"""Export of ``VLAPolicy``: the policy of merged weights, given tokens in place of a text.

Its parameters keep their names in JAX, such as ``params.blocks_0.qkv.kernel``, so that ``policy.vla_config.model_path``
takes such a file. Adapters are merged and what it predicts besides is left out: they leave no trace.

Cases. The observations that an export of a vision-language-action policy is checked on, and JAX's answers to them.

As ``interop.artefacts.cases``, with the environment's texts in ``environment``, ``huge``, ``not_a_number`` and
``noise``, and others in ``edges``; ``zeros`` has none. Two more have the environment's pictures and numbers:

    texts       adversarial texts, see ``interop.artefacts.texts``
    sampled     the environment's texts; the flow starts from N(0, 1), where it starts from 0 in all others but
                ``edges`` (0 or ±4 for each number)

The answers are those of the policy as it was trained, to the bytes of the text: with its adapters next to its weights,
and its own tokenizer. An artefact is given tokens, and has the adapters merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from io import BytesIO
from typing import Any, cast

import gymnasium
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.envs.actions import ActionForm
from ejax.numerics.text import as_text
from ejax.policies.pretrained.token_states import FEATURES, TokenStates
from ejax.policies.vla.network import PREDICTION
from ejax.policies.vla.policy import VLAPolicy
from ejax.policies.vla.words import Words
from ejax.schema.plain_files import to_json
from ejax.types import Array, Params
from interop.artefacts.adversaries import adversarial_observations
from interop.artefacts.cases import answered, feature_ranges
from interop.artefacts.texts import TEXTS, adversarial_texts, texts_document
from interop.exporters.record import Exporter, named_weights
from interop.exporters.vision import image_shapes
from interop.standalone_verify import Arrays, Case
from interop.twin.sentences import KIND, WEIGHTS, checked_numbers
from interop.twin.spec import NOISE, TOKENS, Paths, ProgramSpec, TextSpec
from interop.twin.text import TOKENIZER, Tokenizer

_NUM_ROWS = 64
"""Rows of each of the two further kinds."""
_MAX_TEXTS = 64
"""Texts of the environment's, in texts.json."""
_FAR = 4.0


def _describe(policy: VLAPolicy, leaves: Mapping[str, Any], paths: Paths) -> tuple[Any, ProgramSpec]:
    """Describe the policy with products of float32, which is what is exported."""
    policy = replace(policy, model=policy.model.model_copy(update={"torch_dtype": "float32"}))
    model, words = policy.model, policy.words
    states = isinstance(words, TokenStates)
    if taken := {TOKENS, NOISE} & {*model.images, *model.numbers}:
        raise ValueError(f"an export has its own inputs called {', '.join(sorted(taken))}; rename the observation's")
    text = TextSpec(
        part=model.text,
        instruction=bytes(policy.instruction).decode() if policy.instruction is not None else None,
        max_words=words.max_words,
        num_tokens=words.num_tokens,
        features=FEATURES if states else 0,
    )
    return policy, ProgramSpec(
        images=image_shapes(model.images, leaves),
        observation={name: int(leaves[name].shape[-1]) for name in sorted(model.numbers)},
        text=text,
        paths=paths,
        horizon=policy.horizon,
        sizes=(policy.horizon * policy.action_dim,),
        head="flow" if model.head.type == "flow" else "normal",
        pixels_round=model.image_encoder.type != "efficientnet",
    )


def _actor_params(policy: VLAPolicy, params: Params) -> Params:
    merged = policy.merge(params)
    trained = {name: x for name, x in merged["params"].items() if name != PREDICTION}
    return {**merged, "params": trained}


class _Tokens(Words):
    """The tokenizer of a policy that is given tokens."""

    def tokens_of(self, text: Array) -> Array:
        return text


class _States(TokenStates):
    """The same of one that is given states of tokens."""

    def tokens_of(self, text: Array) -> Array:
        return text


def _token_actor(policy: VLAPolicy) -> Any:
    """Make the policy of merged weights, without a critic, whose text is tokens already, int32 [..., max_words], or
    their states, float32 [..., max_words, 384]."""
    own = policy.words
    words = (_Tokens if isinstance(own, Words) else _States)(*(getattr(own, each.name) for each in fields(own)))
    model = policy.model.model_copy(update={"critic": False, "lora": None})
    return replace(policy, model=model, words=words, instruction=None)


def _draw_cases(
    policy: VLAPolicy, params: Params, spec: ProgramSpec, seen: Arrays, space: gymnasium.Space, form: ActionForm
) -> list[Case]:
    """Draw the cases that the module's text lists.

    Args:
        seen: observations of the environment by path, [B, ...] each: images and text uint8.
        space: of the observation; its finite bounds are edges too.
        form: of the actions.
    """
    rng = np.random.default_rng(2)
    parts = {name: seen[name] for name in (*spec.images, *spec.observation)}
    own = _texts(policy, seen)
    observations = {"environment": dict(parts)}
    observations |= adversarial_observations(parts, feature_ranges(parts, space, spec), spec)
    some = {name: np.take(x, np.arange(_NUM_ROWS), axis=0, mode="wrap") for name, x in parts.items()}
    observations |= {kind: dict(some) for kind in (("texts", "sampled") if spec.head == "flow" else ("texts",))}
    adversarial = _adversarial(policy, own)
    length = max(map(len, (*own, *adversarial))) + 1
    for name, obs in observations.items():
        rows = len(next(iter(obs.values())))
        texts = {"edges": adversarial[::-1], "texts": adversarial, "zeros": [b""]}.get(name, own)
        obs[policy.model.text] = _padded([texts[i % len(texts)] for i in range(rows)], length)
        shape = (rows, spec.sizes[0])
        starts = {"sampled": rng.normal(size=shape), "edges": rng.choice((-_FAR, 0.0, _FAR), shape)}
        if spec.head == "flow":
            obs[NOISE] = starts.get(name, np.zeros(shape)).astype(np.float32)
    instructed: Any = replace(policy, instruction=None)

    def tokenized(given: Arrays) -> Arrays:
        texts = given[policy.model.text]
        if isinstance(policy.words, TokenStates):  # JAX's: another machine's products round otherwise, see texts.json
            return {**given, TOKENS: policy.words.encode(texts)}
        return {**given, TOKENS: Tokenizer.from_json(policy.words.to_json()).tokens(texts, texts.shape[:1])}

    return answered(instructed, params, spec, form, observations, tokenized)


def _text_documents(policy: VLAPolicy, seen: Arrays) -> dict[str, Any]:
    """``tokenizer.json``, ``texts.json`` with JAX's tokens, and the weights of a text encoder."""
    own, words = sorted(set(_texts(policy, seen)))[:_MAX_TEXTS], policy.words
    texts = [*own, *_adversarial(policy, own)]
    padded = _padded(texts, max(map(len, texts)) + 1)
    if isinstance(words, Words):
        tokens = np.asarray(words.tokens_of(jnp.asarray(padded))).tolist()
        return {TOKENIZER: words.to_json(), TEXTS: texts_document(texts, tokens)}
    ids = [words.tokenizer.ids(as_text(row)) for row in padded]
    tokens = [checked_numbers(*each) for each in zip(ids, words.encode(padded), strict=True)]
    reader = {"type": KIND, "max_words": words.max_words, "tokenizer": words.tokenizer.tokenizer.to_str()}
    np.savez(weights := BytesIO(), **cast(dict[str, Any], words.arrays()))
    return {TOKENIZER: to_json(reader, "null"), WEIGHTS: weights.getvalue(), TEXTS: texts_document(texts, tokens)}


def _adversarial(policy: VLAPolicy, own: Sequence[bytes]) -> list[bytes]:
    """Texts that two readers may take apart differently, of those that the policy takes."""
    if isinstance(policy.words, Words):
        return adversarial_texts(policy.words.vocabulary, policy.words.max_words)
    most, ids = policy.words.max_words, policy.words.tokenizer.ids
    vocabulary = sorted({word for text in own for word in text.decode(errors="replace").lower().split()}) or ["cube"]
    return [x for x in adversarial_texts(vocabulary, most) if len(ids(as_text(np.frombuffer(x, np.uint8)))) <= most]


def _texts(policy: VLAPolicy, seen: Arrays) -> list[bytes]:
    """Return the environment's texts, row by row, or the policy's one."""
    if policy.instruction is not None:
        return [bytes(policy.instruction)]
    return [row.tobytes().rstrip(b"\0") for row in seen[policy.model.text]]


def _padded(texts: Sequence[bytes], length: int) -> NDArray[np.uint8]:
    """[len(texts), length], zeros behind each."""
    return np.frombuffer(b"".join(text.ljust(length, b"\0") for text in texts), np.uint8).reshape(len(texts), length)


def _facts(policy: VLAPolicy) -> dict[str, Any]:
    return {"torch_dtype": {"training": policy.model.torch_dtype, "proof": "float32"}}


EXPORTER = Exporter(
    describe=_describe,
    actor_of=_token_actor,
    actor_params=_actor_params,
    state_dict=lambda policy, params: named_weights(_actor_params(policy, params)),
    observation=lambda spec, inputs: {spec.text.part if name == TOKENS else name: x for name, x in inputs.items()},
    draw_cases=_draw_cases,
    documents=_text_documents,
    facts=_facts,
)
