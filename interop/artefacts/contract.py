"""The inputs and outputs of an exported policy: names, order, shapes, units, ranges, control rate."""

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from ejax.envs.description import Feature, describe
from ejax.training.environments import sample_obs
from ejax.types import Env, HostEnv
from interop.artefacts.cases import feature_ranges, leaves_of
from interop.artefacts.texts import TEXTS
from interop.standalone_verify import Arrays
from interop.twin.kinds import Spec
from interop.twin.sentences import WEIGHTS
from interop.twin.spec import MEMORY, NEXT_MEMORY, NOISE, TOKENS, MemorySpec, ProgramSpec, TextSpec
from interop.twin.text import TOKENIZER


def make_contract(
    env_config: dict[str, Any], env: Env | HostEnv, spec: Spec, seen: Arrays, clipping: str
) -> dict[str, Any]:
    """Describe the inputs and outputs as ``contract.json`` has them.

    Args:
        env_config: ``id`` and ``cfg`` of the environment.
        seen: observations of the environment by path, [B, ...] each.
        clipping: the reason that the action is clipped, or is not.
    """
    description = describe(env)
    chunk = description.actions_per_decision
    ranges = feature_ranges(seen, env.observation_space, spec)
    observation = [
        *(_entry(name, spec, meaning=_IMAGE, low=0, high=255) for name in spec.images),
        *(
            _numbers(name, spec, description.observation.get(name), ranges[name])
            | (_text(spec.observation[name]) if name in description.text else {})
            for name in spec.numbers
        ),
    ]
    if spec.text is not None:
        observation.append(_tokens(spec, spec.text, seen))
    if spec.head == "flow":
        observation.append(_entry(NOISE, spec, meaning=_NOISE, default=0.0))
    if spec.memory is not None:
        observation.append(_memory(spec, spec.memory))
    if isinstance(spec, ProgramSpec) and spec.horizon:
        chunk = spec.horizon
    outputs = [
        {
            "name": name,
            "shape": ["batch", *spec.output_shape(name)],
            "dtype": "int32" if name == "action" and not spec.continuous else "float32",
            "meaning": _MEANING[name],
        }
        for name in spec.outputs
    ]
    return {
        "schema_version": 1,
        "call": "every artefact takes the arrays of 'observation' in this order and returns those of 'outputs'; "
        "all have the batch axis: a single observation is a batch of one",
        **_env_facts(env_config, env),
        "observation": observation,
        "outputs": outputs,
        "action": {
            "head": spec.head,
            **_action_facts(env, chunk),
            "clipped": spec.clip is not None,
            "clipping": clipping,
        },
    }


def run_contract(env_config: dict[str, Any], env: Env | HostEnv, clipped: bool) -> dict[str, Any]:
    """Describe a policy that is not exported, by the facts of its environment alone."""
    description = describe(env)
    observation = []
    for name, x in leaves_of(sample_obs(env, 1)).items():
        features = _features(description.observation.get(name))
        text = _text(x.shape[1]) if name in description.text else {}
        observation.append({"name": name, "shape": ["batch", *x.shape[1:]], "features": features, **text})
    return {
        "schema_version": 1,
        **_env_facts(env_config, env),
        "observation": observation,
        "action": {**_action_facts(env, description.actions_per_decision), "clipped": clipped},
    }


def _env_facts(env_config: dict[str, Any], env: Env | HostEnv) -> dict[str, Any]:
    description = describe(env)
    period = description.control_period
    facts = {"parameters": description.parameters, "max_episode_steps": env.max_episode_steps or None}
    return {"env": {**env_config, **facts}, "control_rate_hz": None if period is None else round(1.0 / period, 6)}


def _action_facts(env: Env | HostEnv, chunk: int) -> dict[str, Any]:
    space, description = env.action_space, describe(env)
    chunks = _chunk(space, chunk, description.control_period)
    return {"features": _features(description.action), **chunks, **_action_bounds(space)}


_IMAGE = "an image: rows from the top, columns from the left, red, green, blue; taken as it is, not scaled"
_NOISE = (
    "what the flow starts from: zeros for the action that evaluation plays, N(0, 1) for a sample. Equal noise "
    "gives equal bits in one format and batch; policy.onnx takes zeros by default"
)
_MEANING = {
    "action": "the most probable action, of the environment's space: send this",
    "mean": "of the normal distribution, before tanh, clipping and rounding",
    "log_std": "of the normal distribution; log of the standard deviation",
    "logits": "unnormalized log-probabilities of the choices, dimension after dimension",
    NEXT_MEMORY: "the memory for the next step of the same episode",
    "unclipped": "the action where the flow ends, before clipping",
}


def _entry(name: str, spec: Spec, **facts: Any) -> dict[str, Any]:
    """Describe an input by its form, and these facts."""
    form = {"shape": ["batch", *spec.input_shape(name)], "dtype": spec.input_dtype(name)}
    return {"name": name, **form, **facts}


def _numbers(name: str, spec: Spec, known: Sequence[Feature] | None, limits: Any) -> dict[str, Any]:
    read = list(spec.read(name))
    entry = _entry(
        name,
        spec,
        features=_features(None if known is None else [known[i] for i in read]),
        low=limits[0][read].tolist(),
        high=limits[1][read].tolist(),
        range="the observation space's bounds; what the policy met in the environment where there are none",
    )
    if name in spec.unread:
        entry["entries"] = read
        entry["entries_of"] = (
            f"which of the {spec.observation[name]} numbers in training these are; the policy does not read the others"
        )
    return entry


def _text(length: int) -> dict[str, Any]:
    return {
        "meaning": "a text: its bytes one after the other as numbers, then zeros up to the length",
        "text": {"encoding": "utf-8", "length": length},
    }


def _memory(spec: Spec, memory: MemorySpec) -> dict[str, Any]:
    if memory.type == "own":
        layout = "the arrays of the policy's memory, one after the other"
    elif memory.type == "history":
        layout = f"the last {memory.length - 1} observations, the last one in the end, and how many there have been"
    else:
        state = "h" if memory.type == "gru" else "h, c"
        layout = f"{state} of each of {memory.depth} layers of {memory.width}, the first layer first"
    meaning = (
        f"what the policy remembers of the episode: {layout}. Zeros at an episode's first step, that is the reset;"
    )
    meaning += f" then the output {NEXT_MEMORY} of the step before"
    return _entry(MEMORY, spec, meaning=meaning, reset=0.0, next=NEXT_MEMORY)


def _tokens(spec: Spec, own: TextSpec, seen: Arrays) -> dict[str, Any]:
    text: dict[str, Any] = {
        "part": own.part,
        "encoding": "utf-8",
        "tokenizer": TOKENIZER,
        "checked_on": TEXTS,
        "length": int(seen[own.part].shape[-1]) if own.part in seen else None,
        "instruction": own.instruction,
    }
    words = (
        "the instruction: a number for each of its words by the tokenizer, 1 for an unknown one, then zeros; "
        "interop.twin makes them without jax and torch. length: most bytes of a text in training; instruction: "
        "the one of a policy that was always given the same"
    )
    if own.features:
        states = "the instruction: the state of each of its tokens in a frozen MiniLM, then zeros; "
        return _entry(TOKENS, spec, meaning=states + words.partition("; ")[2], text={**text, "weights": WEIGHTS})
    return _entry(TOKENS, spec, meaning=words, low=0, high=own.num_tokens - 1, text=text)


def _chunk(space: gymnasium.Space, chunk: int, period: float | None) -> dict[str, Any]:
    """Describe chunks of actions; nothing for single actions."""
    if chunk == 1 or not isinstance(space, gymnasium.spaces.Box):
        return {}
    return {
        "chunk": {
            "shape": [chunk, space.shape[0] // chunk],
            "meaning": "one decision is a sequence of actions, the first one first: reshape it to this shape",
            "action_rate_hz": None if period is None else round(chunk / period, 6),
        }
    }


def _features(known: Sequence[Feature] | None) -> list[dict[str, str]] | None:
    return None if known is None else [{"name": name, "unit": unit} for name, unit in known]


def _action_bounds(space: Any) -> dict[str, Any]:
    """Describe the environment's actions, flat: bounds, null where there are none, or choices from ``start`` on."""
    facts = {"shape": list(space.shape or ()), "dtype": str(space.dtype)}
    if isinstance(space, gymnasium.spaces.Box):
        bounds = {"low": space.low, "high": space.high}
        return facts | {
            name: [x if math.isfinite(x) else None for x in b.ravel().tolist()] for name, b in bounds.items()
        }
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        counts = space.n if isinstance(space, gymnasium.spaces.Discrete) else space.nvec
        return facts | {"num_choices": np.ravel(counts).tolist(), "start": np.ravel(space.start).tolist()}
    raise ValueError(f"no contract for the action space {space}")
