"""``policy.name: pi0`` and ``smolvla``: the field's models as policies, from a folder of LeRobot's or openpi's."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ejax.policies.observations import flatten_observation
from ejax.policies.pretrained.weights import WeightsError, find_weights
from ejax.policies.record import PolicyKind
from ejax.policies.vla.adapters import KEPT, Adapted, adopted, merged
from ejax.policies.vla.config import HeadConfig, LoraConfig, ModelConfig, SizesConfig, VLAConfig
from ejax.policies.vla.expert import Context, ExpertNetwork, ExpertSpec, Kind, touch_all
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.policies.vla.lerobot_folder import folder_kind, load_folder, made_spec, read_spec, row_tokenizer, tokenizer
from ejax.policies.vla.words import PADDING, Words, split, vocabulary_of
from ejax.runtime.host_call import host_call
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Params, PyTree

_STATE = "observation.state"
OF_FIELD = ("frozen", "sizes", "statistics")
"""Options of ``model_config`` that only these models have."""
_READ = ("images", "numbers", "text", "torch_dtype", "remat", "head", "critic", "lora", *OF_FIELD)
"""Options that these models have; the others are the built-in model's."""


@dataclass(frozen=True)
class LeRobotPolicy:
    """pi0 or SmolVLA as a policy, ``obs -> (FlowChunk, 0)``.

    Args:
        images, numbers, text: parts of the observation: cameras in the order of ``config.json``, the state's parts in
            that of their names, and the instruction.
        tokens: the longest instruction.
        folder: where ``tokenizer.json`` is. None: ``words`` are read; without these the model can only be compiled.
        instruction: tokens of the only one, and how many they are; None: it is in the observation.
        words: the tokenizer of a model made from nothing.
        lora, frozen: as those of ``Adapted``.
        fits: cloning begins with units of its demonstrations, ``fit_units``.
    """

    spec: ExpertSpec
    head: HeadConfig
    images: tuple[str, ...]
    numbers: tuple[str, ...]
    text: str | None
    tokens: int
    folder: str | None
    instruction: tuple[int, ...] | None = None
    words: Words | None = None
    lora: LoraConfig | None = None
    frozen: tuple[str, ...] | None = None
    fits: bool = False

    predicts = ()

    @cached_property
    def network(self) -> Any:  # an ExpertNetwork: flax types what ``apply`` returns by all that it may return
        network = ExpertNetwork(self.spec)
        return Adapted(network, self.lora, self.frozen) if self.lora is not None or self.frozen else network

    def init(self, key: Key, obs: PyTree) -> Params:
        """Make random variables; statistics are in the collection ``frozen``."""
        given, _ = self.inputs(obs)
        variables = self.network.init(key, given, method=touch_all)
        return {"params": variables.pop("params"), **variables}

    def merge(self, params: Params) -> Params:
        """Return the variables of the model without adapters, all of whose weights are trained."""
        return merged(params, self.lora, KEPT)

    adopt = staticmethod(adopted)

    def fit_units(self, params: Params, obs: PyTree, action: Array) -> Params:
        """Normalize state and actions by mean and deviation of these, [..., F]; a number that never varies by 1."""
        if not self.fits:
            return params
        state = flatten_observation({name: jnp.asarray(obs[name]) for name in self.numbers})
        units = dict(params["frozen"])
        for name, x in (("state", state), ("action", action)):
            mean, deviation = (f(x.reshape(-1, x.shape[-1]), axis=0) for f in (jnp.mean, jnp.std))
            scale = jnp.where(deviation < 1e-6, 1.0, deviation)
            units |= {f"{name}_shift": mean, f"{name}_scale": scale, f"{name}_offset": jnp.zeros_like(mean)}
        return {**params, "frozen": units}

    def apply(self, params: Params, obs: PyTree, *, observe: bool | Array = False, mutable: Any = False) -> Any:
        """Evaluate ``obs``, leaves [..., F]; pictures uint8 [..., H, W, 3], the text uint8 [..., L]."""
        del observe  # its statistics are those of the data set that the model was trained on
        seen = self.chunk(params, obs)
        answer = seen, seen.context[3].reshape(seen.batch)
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
        wanted = [*self.images, *self.numbers]
        wanted += ["token", "read"] if encoded else [] if self.text is None else [self.text]
        rows = {name: jnp.asarray(obs[name]).reshape(-1, *obs[name].shape[len(batch) :]) for name in wanted}
        count = rows[self.images[0]].shape[0]
        if encoded:
            token, read = rows["token"], rows["read"]
        elif self.instruction is not None:
            there = np.arange(self.tokens) < len(self.instruction)
            padded = np.pad(np.array(self.instruction, np.int32), (0, self.tokens - len(self.instruction)))
            token, read = (jnp.broadcast_to(jnp.asarray(x), (count, self.tokens)) for x in (padded, there))
        elif self.words is not None:
            token = self.words.tokens_of(rows[str(self.text)])
            read = token > PADDING
        else:
            text = rows[str(self.text)]
            function = _no_tokenizer if self.folder is None else row_tokenizer(self.folder, self.tokens)
            shape = (*text.shape[:-1], self.tokens)
            shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.bool_))
            token, read = host_call(function, shapes, text, name=f"ejax tokens {self.folder} {self.tokens}")
        state = flatten_observation({name: rows[name] for name in self.numbers})
        pictures = tuple(rows[name] for name in self.images)
        return {"pictures": pictures, "token": token, "read": read, "state": state}, batch


def _no_tokenizer(text: Any) -> Any:
    raise ValueError(
        f"{len(text)} instructions: a model without vla_config.model_path has no tokenizer; name a folder of weights"
    )


def make_of(
    kind: Kind,
    config: VLAConfig,
    action_space: gymnasium.Space[Any],
    observation_space: gymnasium.Space[Any],
    instructions: tuple[str, ...] = (),
) -> LeRobotPolicy:
    """Make the policy for these spaces, with the sizes of the folder's weights, those of ``sizes`` and a vocabulary of
    ``instructions``, or the published ones.

    Raises ValueError for weights that cannot be read, parts that the observation lacks, a chunk that is too long, a
    state or actions of other sizes than the folder's.
    """
    model, default = config.model, ModelConfig()
    given = model.model_fields_set - {*_READ}
    if others := sorted(name for name in given if getattr(model, name) != getattr(default, name)):
        raise ValueError(f"model_config.{others[0]} belongs to the built-in model, not to {kind}; leave it out")
    words = None
    if model.sizes is None:
        spec, options = read_spec(kind, config.model_path)
    else:
        words = _vocabulary(config, model.sizes, instructions)
        spec, options = made_spec(kind, model.sizes, words.num_tokens), {"num_steps": model.head.num_steps}
    steps = int(options.get("num_inference_steps", options.get("num_steps", 10)))
    if model.head.type != default.head.type or model.head.num_steps not in (default.head.num_steps, steps):
        asked = f"model_config.head has {model.head.type} and num_steps {model.head.num_steps}"
        raise ValueError(f"{asked}; {kind} is a flow of the {steps} steps in its config.json: leave both out")
    if not isinstance(action_space, gymnasium.spaces.Box):
        raise ValueError(f"{kind} acts in a Box, got {action_space}")
    parts = observation_space.spaces if isinstance(observation_space, gymnasium.spaces.Dict) else {}
    text = None if config.instruction is not None else model.text
    wanted = (*model.images, *model.numbers, *((text,) if text else ()))
    if missing := [name for name in wanted if name not in parts]:
        remedy = "name its parts in model_config.images, numbers and text, or set vla_config.instruction"
        raise ValueError(f"the observation has no {', '.join(missing)}; it has {', '.join(parts)}: {remedy}")
    horizon, size = config.inference_horizon, math.prod(action_space.shape)
    if words is not None:
        spec = replace(spec, chunk=horizon)
    if horizon > spec.chunk or size % horizon:
        text = f"vla_config.inference_horizon {horizon} must divide the decision's {size} numbers"
        raise ValueError(
            f"{text}, and be at most the model's chunk of {spec.chunk}; set the environment's action_chunk"
        )
    sizes = {
        "state": (sum(math.prod(parts[name].shape or ()) for name in model.numbers), "max_state", _STATE),
        "action": (size // horizon, "max_action", "action"),
    }
    if words is not None:
        spec = replace(spec, max_state=sizes["state"][0], max_action=sizes["action"][0])
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
        critic=model.critic,
    )
    tokens = int(options.get("tokenizer_max_length", 48)) if words is None else words.max_words
    folder = None if config.model_path is None else str(find_weights(config.model_path).parent)
    instruction = None
    if config.instruction is not None and folder is not None:
        token, read = tokenizer(folder, tokens)(config.instruction)
        instruction = tuple(token[read].tolist())
    elif config.instruction is not None:  # without words to be compiled only
        instruction = (0,) * tokens if words is None else tuple(words.encode(config.instruction).tolist())
    head = model.head.model_copy(update={"num_steps": steps})
    fits = model.statistics == "demonstrations" or words is not None
    made = LeRobotPolicy(spec, head, model.images, model.numbers, text, tokens, folder, instruction, words)
    made = replace(made, lora=model.lora, frozen=model.frozen, fits=fits)
    modules = model.lora.modules if model.lora else ()
    if modules or model.frozen:
        shapes = _shapes(made, ExpertNetwork(spec), [parts[name] for name in model.images])["params"]
        paths = list(traverse_util.flatten_dict(shapes))
        linear = [".".join(path[:-1]) for path in paths if path[-1] == "kernel"]
        for chosen, names in ((modules, linear), (model.frozen or (), [".".join(path) for path in paths])):
            if wrong := [each for each in chosen if not any(re.match(each, name) for name in names)]:
                text = f"no weight's name begins with '{wrong[0]}' (model_config.lora.modules, frozen)"
                raise ValueError(f"{text}; the parts are {', '.join(sorted(shapes))}, and a name is {names[-1]}")
    return made


def _shapes(policy: LeRobotPolicy, network: Any, pictures: Sequence[gymnasium.Space[Any]]) -> Params:
    """Return the shapes of a network's variables, for pictures of these spaces."""
    given = {
        "pictures": tuple(jax.ShapeDtypeStruct((1, *(each.shape or ())), np.uint8) for each in pictures),
        "token": jax.ShapeDtypeStruct((1, policy.tokens), jnp.int32),
        "read": jax.ShapeDtypeStruct((1, policy.tokens), jnp.bool_),
        "state": jax.ShapeDtypeStruct((1, policy.spec.state_dim), jnp.float32),
    }
    shapes: Params = jax.eval_shape(partial(network.init, method=touch_all), jax.random.key(0), given)
    return shapes


def _vocabulary(config: VLAConfig, sizes: SizesConfig, instructions: tuple[str, ...]) -> Words:
    texts = instructions if config.instruction is None else (config.instruction,)
    longest = max(texts, key=lambda each: len(split(each)), default="")
    if not texts or len(split(longest)) > sizes.max_words:
        text = f"an instruction of {len(split(longest))} words, '{longest}'" if texts else "no instructions"
        raise ValueError(f"model_config.sizes.max_words is {sizes.max_words}, and the environment has {text}")
    return Words(vocabulary_of(texts), sizes.max_words)


def open_folder(folder: Path) -> tuple[LeRobotPolicy, Params, dict[str, gymnasium.Space[Any]]]:
    """Open a folder of LeRobot's without an environment: the policy, its weights, and the observation that it reads.

    It has the folder's names, and ``prompt``; pictures are uint8 [H, W, 3]. WeightsError, ValueError: as ``make_of``.
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
    shapes = _shapes(policy, policy.network, [spaces[name] for name in images])
    return policy, load(policy, shapes, config)[0], spaces


def load(policy: LeRobotPolicy, params: Params, config: VLAConfig) -> tuple[Params, list[str]]:
    """Put the folder's weights into ``params``; return them with messages. Raises WeightsError as ``load_folder``."""
    if config.model_path is None:
        return params, [f"{policy.spec.kind} has random weights: policy.vla_config.model_path names none"]
    _, options = read_spec(policy.spec.kind, config.model_path)
    like: Any = jax.eval_shape(policy.merge, params)
    critic = {name: x for name, x in params["params"].items() if name == "critic"}  # no file has it
    like["params"] = {name: x for name, x in like["params"].items() if name not in critic}
    loaded, notes = load_folder(like, policy.spec.kind, config.model_path, options)
    return policy.adopt({**loaded, "params": {**loaded["params"], **critic}}, params), notes


def _problems(section: Any) -> Iterator[Problem]:
    config = section.vla_config
    if config is None or config.model_class is not None:
        yield Problem("policy.vla_config", f"{section.name} needs {{model_path: FOLDER}}, and no model_class")
    elif config.model.sizes is not None and config.model_path is not None:
        text = "are for a model without weights, and those of model_path have their own; leave one out"
        yield Problem("policy.vla_config.model_config.sizes", text)


def _kind(kind: Kind) -> PolicyKind:
    def make(
        vla_config: VLAConfig, action_space: Any, observation_space: Any, instructions: tuple[str, ...] = ()
    ) -> LeRobotPolicy:
        return make_of(kind, vla_config, action_space, observation_space, instructions)

    unread = dict.fromkeys((*UNREAD, "actor_obs_normalization"), LEAVE_OUT)
    return PolicyKind(make=make, unread=unread, problems=_problems)


UNREAD = (
    *("actor", "critic", "initial_log_std", "log_std_range"),
    *("squash_actions", "critic_obs_normalization", "obs_groups"),
)
"""Keys of the section ``policy`` that neither these models have nor the built-in one."""
LEAVE_OUT = "{name} does not have it: its parts are in policy.vla_config; leave it out"
PI0, SMOLVLA = _kind("pi0"), _kind("smolvla")
