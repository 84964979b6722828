"""``policy.name: pi0`` and ``smolvla``: the field's models as policies, from a folder of LeRobot's or openpi's."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from ejax.policies.observations import flatten_observation
from ejax.policies.pretrained.weights import WeightsError, find_weights
from ejax.policies.record import PolicyKind
from ejax.policies.vla.config import HeadConfig, ModelConfig, VLAConfig
from ejax.policies.vla.expert import Context, ExpertNetwork, ExpertSpec, Kind, touch_all
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.policies.vla.lerobot_folder import folder_kind, load_folder, read_spec, row_tokenizer, tokenizer
from ejax.runtime.host_call import host_call
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Params, PyTree

_STATE = "observation.state"
_READ = ("images", "numbers", "text", "torch_dtype", "remat", "head")
"""Options of ``model_config`` that these models have; the others are the built-in model's."""


@dataclass(frozen=True)
class LeRobotPolicy:
    """pi0 or SmolVLA as a policy, ``obs -> (FlowChunk, 0)``.

    Args:
        images, numbers, text: parts of the observation: cameras in the order of ``config.json``, the state's parts in
            that of their names, and the instruction.
        tokens: the longest instruction.
        folder: where ``tokenizer.json`` is. None: the model has no weights, and can only be compiled.
        instruction: tokens of the only one, and how many they are; None: it is in the observation.
    """

    spec: ExpertSpec
    head: HeadConfig
    images: tuple[str, ...]
    numbers: tuple[str, ...]
    text: str | None
    tokens: int
    folder: str | None
    instruction: tuple[int, ...] | None = None

    predicts = ()

    @cached_property
    def network(self) -> Any:  # an ExpertNetwork: flax types what ``apply`` returns by all that it may return
        return ExpertNetwork(self.spec)

    def init(self, key: Key, obs: PyTree) -> Params:
        """Make random variables; statistics are in the collection ``frozen``."""
        given, _ = self.inputs(obs)
        variables = self.network.init(key, given, method=touch_all)
        return {"params": variables.pop("params"), **variables}

    def apply(self, params: Params, obs: PyTree, *, observe: bool | Array = False, mutable: Any = False) -> Any:
        """Evaluate ``obs``, leaves [..., F]; pictures uint8 [..., H, W, 3], the text uint8 [..., L]."""
        del observe  # its statistics are those of the data set that the model was trained on
        seen = self.chunk(params, obs)
        answer = seen, jnp.zeros(seen.batch)
        return (answer, {}) if mutable else answer

    def chunk(self, params: Params, obs: PyTree) -> FlowChunk:
        """Return the distribution of chunks; ``obs`` may have ``token`` and ``read`` [..., tokens] for the text."""
        given, batch = self.inputs(obs)
        context: Context = self.network.apply(params, **given, method="encode")
        spec = FlowSpec(self.network, self.spec.chunk, self.spec.max_action, self.head, self.spec.action_dim)
        return FlowChunk(params, context, spec, batch)

    def inputs(self, obs: PyTree) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return arguments [B, ...] of ``ExpertNetwork.encode``, and the leading axes."""
        batch = obs[self.images[0]].shape[:-3]
        encoded = {"token", "read"} <= obs.keys()
        text = () if encoded or self.text is None else (self.text,)
        wanted = (*self.images, *self.numbers, *text, *(("token", "read") if encoded else ()))
        rows = {name: jnp.asarray(obs[name]).reshape(-1, *obs[name].shape[len(batch) :]) for name in wanted}
        count = rows[self.images[0]].shape[0]
        if encoded:
            token, read = rows["token"], rows["read"]
        elif self.instruction is not None:
            there = np.arange(self.tokens) < len(self.instruction)
            padded = np.pad(np.array(self.instruction, np.int32), (0, self.tokens - len(self.instruction)))
            token, read = (jnp.broadcast_to(jnp.asarray(x), (count, self.tokens)) for x in (padded, there))
        else:
            token, read = self._encoded(rows[str(self.text)])
        state = flatten_observation({name: rows[name] for name in self.numbers})
        pictures = tuple(rows[name] for name in self.images)
        return {"pictures": pictures, "token": token, "read": read, "state": state}, batch

    def _encoded(self, text: Array) -> tuple[Array, Array]:
        shape = (*text.shape[:-1], self.tokens)
        function = _no_tokenizer if self.folder is None else row_tokenizer(self.folder, self.tokens)
        shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.bool_))
        token, read = host_call(function, shapes, text, name=f"ejax tokens {self.folder} {self.tokens}")
        return token, read


def _no_tokenizer(text: Any) -> Any:
    raise ValueError(
        f"{len(text)} instructions: a model without vla_config.model_path has no tokenizer; name a folder of weights"
    )


def make_of(
    kind: Kind, config: VLAConfig, action_space: gymnasium.Space[Any], observation_space: gymnasium.Space[Any]
) -> LeRobotPolicy:
    """Make the policy for these spaces, with the sizes of the folder's weights, or the published ones without a folder.

    Raises ValueError for weights that cannot be read, parts that the observation lacks, a chunk that is too long, a
    state or actions of other sizes than the folder's.
    """
    spec, options = read_spec(kind, config.model_path)
    model = config.model
    if others := sorted(name for name in model.model_fields_set - {*_READ} if getattr(model, name) != _default(name)):
        raise ValueError(f"model_config.{others[0]} belongs to the built-in model, not to {kind}; leave it out")
    steps, default = int(options.get("num_inference_steps", options.get("num_steps", 10))), HeadConfig()
    if model.head.type != default.type or model.head.num_steps not in (default.num_steps, steps):
        given = f"model_config.head has {model.head.type} and num_steps {model.head.num_steps}"
        raise ValueError(f"{given}; {kind} is a flow of the {steps} steps in its config.json: leave both out")
    if not isinstance(action_space, gymnasium.spaces.Box):
        raise ValueError(f"{kind} acts in a Box, got {action_space}")
    parts = observation_space.spaces if isinstance(observation_space, gymnasium.spaces.Dict) else {}
    text = None if config.instruction is not None else model.text
    wanted = (*model.images, *model.numbers, *((text,) if text else ()))
    if missing := [name for name in wanted if name not in parts]:
        remedy = "name its parts in model_config.images, numbers and text, or give vla_config.instruction"
        raise ValueError(f"the observation has no {', '.join(missing)}; it has {', '.join(parts)}: {remedy}")
    horizon, size = config.inference_horizon, math.prod(action_space.shape)
    if horizon > spec.chunk or size % horizon:
        text = f"vla_config.inference_horizon {horizon} must divide the decision's {size} numbers"
        raise ValueError(
            f"{text}, and be at most the model's chunk of {spec.chunk}; give the environment's action_chunk"
        )
    sizes = {
        "state": (sum(math.prod(parts[name].shape or ()) for name in model.numbers), "max_state", _STATE),
        "action": (size // horizon, "max_action", "action"),
    }
    features = {**options.get("input_features", {}), **options.get("output_features", {})}
    for name, (here, most, key) in sizes.items():
        theirs = features.get(key, {}).get("shape", [here])[0]
        if here != theirs or here > getattr(spec, most):
            text = f"the environment's {name} has {here} numbers, the model's {theirs} of at most {getattr(spec, most)}"
            raise ValueError(f"{text}; choose other parts in model_config.numbers, or another environment")
    spec = replace(
        spec,
        state_dim=sizes["state"][0],
        action_dim=sizes["action"][0],
        horizon=horizon,
        torch_dtype=model.torch_dtype,
        remat=model.remat,
    )
    tokens = int(options.get("tokenizer_max_length", 48))
    folder = None if config.model_path is None else str(find_weights(config.model_path).parent)
    instruction = None
    if config.instruction is not None and folder is not None:
        token, read = tokenizer(folder, tokens)(config.instruction)
        instruction = tuple(token[read].tolist())
    elif config.instruction is not None:
        instruction = (0,) * tokens  # to be compiled only
    head = model.head.model_copy(update={"num_steps": steps})
    return LeRobotPolicy(spec, head, model.images, model.numbers, text, tokens, folder, instruction)


def open_folder(folder: Path) -> tuple[LeRobotPolicy, Params, dict[str, gymnasium.Space[Any]]]:
    """Open a folder of LeRobot's without an environment: the policy, its weights, and the observation that it reads.

    That has the folder's own names, and ``prompt``; pictures are uint8 [H, W, 3]. Raises WeightsError, ValueError as
    ``make_of``.
    """
    kind = folder_kind(str(folder))
    if kind is None:
        raise WeightsError(
            f"{folder} has no config.json of {' or '.join(get_args(Kind))}; it is not a folder of LeRobot's"
        )
    _, options = read_spec(kind, str(folder))
    features, out = options.get("input_features") or {}, options.get("output_features") or {}
    spaces: dict[str, gymnasium.Space[Any]] = {}
    for name, feature in features.items():
        shape = tuple(feature["shape"])
        if feature["type"] == "VISUAL" and "empty_camera" not in name:  # LeRobot's fill-ins change nothing
            spaces[name] = gymnasium.spaces.Box(0, 255, (*shape[1:], shape[0]), np.uint8)
        elif name == _STATE:
            spaces[name] = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
    images = [name for name in spaces if name != _STATE]
    if not images or _STATE not in spaces or "action" not in out:
        raise WeightsError(
            f"{folder / 'config.json'} must name pictures, {_STATE} and action; it has {', '.join(features)}"
        )
    horizon = int(options.get("n_action_steps", options.get("chunk_size", 50)))
    model = {"images": images, "numbers": [_STATE], "text": "prompt"}
    section = {"model_path": str(folder), "inference_horizon": horizon, "model_config": model}
    config = VLAConfig.model_validate_json(json.dumps(section, allow_nan=False))
    text = gymnasium.spaces.Box(0, 255, (1,), np.uint8)
    action = gymnasium.spaces.Box(-np.inf, np.inf, (horizon * out["action"]["shape"][0],), np.float32)
    policy = make_of(kind, config, action, gymnasium.spaces.Dict({**spaces, "prompt": text}))
    obs = {name: jax.ShapeDtypeStruct((1, *(space.shape or ())), space.dtype) for name, space in spaces.items()}
    given = {
        "pictures": tuple(obs[name] for name in images),
        "token": jax.ShapeDtypeStruct((1, policy.tokens), jnp.int32),
        "read": jax.ShapeDtypeStruct((1, policy.tokens), jnp.bool_),
        "state": obs[_STATE],
    }
    shapes = jax.eval_shape(partial(policy.network.init, method=touch_all), jax.random.key(0), given)
    return policy, load(policy, shapes, config)[0], spaces


def load(policy: LeRobotPolicy, params: Params, config: VLAConfig) -> tuple[Params, list[str]]:
    """Put the folder's weights into ``params``; return them with messages. Raises WeightsError as ``load_folder``."""
    if config.model_path is None:
        return params, [f"{policy.spec.kind} has random weights: policy.vla_config.model_path names none"]
    _, options = read_spec(policy.spec.kind, config.model_path)
    return load_folder(params, policy.spec.kind, config.model_path, options)


def _default(name: str) -> Any:
    return ModelConfig.model_fields[name].get_default(call_default_factory=True)


def _problems(section: Any) -> Iterator[Problem]:
    if section.vla_config is None or section.vla_config.model_class is not None:
        yield Problem("policy.vla_config", f"{section.name} needs {{model_path: FOLDER}}, and no model_class")


def _kind(kind: Kind) -> PolicyKind:
    def make(vla_config: VLAConfig, action_space: Any, observation_space: Any) -> LeRobotPolicy:
        return make_of(kind, vla_config, action_space, observation_space)

    unread = dict.fromkeys((*UNREAD, "actor_obs_normalization"), LEAVE_OUT)
    return PolicyKind(make=make, unread=unread, problems=_problems)


UNREAD = (
    *("actor", "critic", "initial_log_std", "log_std_range"),
    *("squash_actions", "critic_obs_normalization", "obs_groups"),
)
"""Keys of the section ``policy`` that neither these models have nor the built-in one."""
LEAVE_OUT = "{name} does not have it: its parts are in policy.vla_config; leave it out"
PI0, SMOLVLA = _kind("pi0"), _kind("smolvla")
