"""``policy.name: vla``: the built-in model as a policy, or one of the user's own, and the first weights of any."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ejax.distributions import Normal, action_spec
from ejax.numerics.text import as_bytes
from ejax.policies.heads import clip_like_torch
from ejax.policies.pretrained.efficientnet import load_efficientnet
from ejax.policies.pretrained.token_states import TokenStates
from ejax.policies.pretrained.weights import fit_weights, load_weights
from ejax.policies.record import PolicyKind, find_policy
from ejax.policies.vla.adapters import adopted, merged
from ejax.policies.vla.config import ModelConfig, TextEncoderConfig, VLAConfig
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.policies.vla.lerobot_folder import folder_kind
from ejax.policies.vla.lerobot_policy import LEAVE_OUT, OF_FIELD, UNREAD, LeRobotPolicy, load, make_of
from ejax.policies.vla.network import PREDICTION, Context, VLANetwork
from ejax.policies.vla.words import Words, split, vocabulary_of
from ejax.schema.problems import Problem
from ejax.types import Array, Key, Params, PyTree

LOG_STD_RANGE = (-5.0, 2.0)
_DEFAULT = ModelConfig()


@dataclass(frozen=True)
class VLAPolicy:
    """Vision-language-action policy, ``obs -> (distribution of chunks, value [...])``.

    The distribution is ``FlowChunk`` or ``Normal``.

    Args:
        horizon: K, actions of a chunk.
        action_dim: A, numbers of one action.
        instruction: for observations that have no text; uint8 bytes, as a tuple.
        action_std_init: of a Gaussian head.
        predicted_sizes: numbers of each part in ``model.predicts``.
    """

    model: ModelConfig
    horizon: int
    action_dim: int
    words: Words | TokenStates
    instruction: tuple[int, ...] | None = None
    action_std_init: float = 0.1
    normalize: bool = False
    predicted_sizes: tuple[int, ...] = ()

    @property
    def predicts(self) -> tuple[str, ...]:
        """Parts that cloning compares with what is predicted."""
        return tuple(self.model.asks + name for name in self.model.predicts)

    def init(self, key: Key, obs: PyTree) -> Params:
        """Make variables; with ``lora`` the trunk's are in the collection ``frozen``."""
        variables = self.network.init(key, self._flat(obs)[0], method=_touch_all)
        return {"params": variables.pop("params"), **variables}

    def apply(
        self, params: Params, obs: PyTree, *, observe: bool | Array = False, mutable: Any = False, predict: bool = False
    ) -> Any:
        """Evaluate ``obs``, leaves [..., F]; pictures uint8 [..., H, W, 3], the text uint8 [..., L]. ``observe`` and
        ``mutable`` as in ``ejax.policies.normalize``; ``predict`` adds a third result {name: [..., F]}."""
        also = (*self.model.predicts, *((self.model.asks + self.model.text,) if predict else ()))
        rows, batch = self._flat(obs, also if predict or observe is not False else ())
        if not isinstance(observe, bool):
            observe = observe.reshape(-1)  # the network knows one leading axis
        answer = self.network.apply(params, rows, observe, method="encode", mutable=mutable)
        context, value = answer[0] if mutable else answer
        seen = self._distribution(params, context, batch), value.reshape(batch)
        if predict:
            predicted = self.network.apply(params, context, method="predict")
            return *seen, {name: x.reshape(*batch, -1) for name, x in predicted.items()}
        return (seen, answer[1]) if mutable else seen

    @property
    def text(self) -> str | None:
        by_word = self.instruction is None and isinstance(self.words, Words)
        return self.model.text if by_word else None

    @cached_property
    def network(self) -> Any:  # a VLANetwork: flax types what ``apply`` returns by all that it may return
        initial_log_std = math.log(self.action_std_init)
        sizes = (self.model, self.horizon, self.action_dim)
        return VLANetwork(*sizes, self.words, self.normalize, initial_log_std, self.predicted_sizes)

    adopt = staticmethod(adopted)

    def merge(self, params: Params) -> Params:
        """Merge into variables of the policy without ``lora``: W + (alpha / rank)·A·B in every linear layer."""
        return merged(params, self.model.lora, "frozen")

    def _distribution(self, params: Params, context: Context, batch: tuple[int, ...]) -> Any:
        if self.model.head.type == "flow":
            spec = FlowSpec(self.network, self.horizon, self.action_dim, self.model.head)
            return FlowChunk(params, context, spec, batch)
        mean, log_std = self.network.apply(params, context, method="gaussian")
        mean = mean.reshape(*batch, -1)
        return Normal(mean, jnp.broadcast_to(clip_like_torch(log_std, *LOG_STD_RANGE), mean.shape))

    def _flat(self, obs: PyTree, also: tuple[str, ...] = ()) -> tuple[dict[str, Array], tuple[int, ...]]:
        """Return the parts that are read, and those of ``also`` that exist, leaves [B, ...], and their leading axes."""
        c = self.model
        wanted = (*c.images, *c.numbers, *((c.text,) if self.instruction is None else ()))
        wanted = (*wanted, *(name for name in also if name in obs))
        batch = obs[c.numbers[0]].shape[:-1] if c.numbers else obs[c.images[0]].shape[:-3]
        rows = {name: jnp.asarray(obs[name]).reshape(-1, *obs[name].shape[len(batch) :]) for name in wanted}
        if self.instruction is not None:
            text = jnp.asarray(np.array(self.instruction, np.uint8))
            rows[c.text] = jnp.broadcast_to(text, (len(next(iter(rows.values()))), len(self.instruction)))
        return rows, batch

    def check_obs(self, obs: PyTree) -> None:
        """Refuse a text of too many tokens; outside programs, whose error would be JAX's."""
        if isinstance(self.words, TokenStates) and self.instruction is None:
            self.words.encode(np.asarray(obs[self.model.text]))


def _touch_all(network: VLANetwork, obs: PyTree) -> None:
    context, _ = network.encode(obs)
    rows = len(context[1])
    if network.config.head.type == "flow":
        network.velocity(context, jnp.zeros((rows, network.horizon, network.action_dim)), jnp.zeros(rows))
    else:
        network.gaussian(context)
    if network.config.predicts:
        network.predict(context)


def make(
    vla_config: VLAConfig,
    action_space: gymnasium.Space,
    observation_space: gymnasium.Space,
    instructions: tuple[str, ...] = (),
    actor_obs_normalization: bool = False,
) -> Any:
    """Make the policy that ``policy.vla_config`` describes, for these spaces.

    ``instructions`` are the environment's texts for training, whose words are the default vocabulary.
    Raises ValueError for a horizon that does not divide the actions, parts that the observation lacks, pictures of
    another type, no words, an instruction of too many.
    """
    if vla_config.model_class is not None:
        return _make_own(vla_config, action_space, observation_space)
    if (kind := folder_kind(vla_config.model_path)) is not None:
        return make_of(kind, vla_config, action_space, observation_space, instructions)
    if not isinstance(action_space, gymnasium.spaces.Box):
        raise ValueError(f"the vla policy acts in a Box, got {action_space}")
    model = vla_config.model
    others = [name for name in OF_FIELD if getattr(model, name) != getattr(_DEFAULT, name)]
    if others or (model.lora is not None and model.lora.modules):
        text = f"model_config.{others[0] if others else 'lora.modules'} belongs to pi0 and smolvla; leave it out"
        raise ValueError(f"{text}, or set policy.name to pi0")
    size, horizon = math.prod(action_space.shape), vla_config.inference_horizon  # numbers of a whole chunk
    if size % horizon:
        text = f"vla_config.inference_horizon {horizon} does not divide the decision's {size} numbers"
        raise ValueError(f"{text}; set the environment's action_chunk")
    parts = _parts_of(model, observation_space)
    fixed = vla_config.instruction
    if fixed is None and model.text not in parts:
        raise ValueError(f"the observation has no text '{model.text}', and vla_config.instruction is not given")
    return VLAPolicy(
        model,
        horizon,
        size // horizon,
        _reader(model.text_encoder, instructions if fixed is None else (fixed,)),
        None if fixed is None else tuple(as_bytes(fixed, len(fixed.encode())).tolist()),
        vla_config.action_std_init,
        actor_obs_normalization,
        tuple(math.prod(parts[name].shape or ()) for name in model.predicts),
    )


def _reader(encoder: TextEncoderConfig, texts: Sequence[str]) -> Words | TokenStates:
    """Make what reads instructions. Raises ValueError for no words, or one of ``texts`` with too many."""
    if encoder.type == "minilm":
        return TokenStates(encoder.weights, encoder.max_words)
    words = encoder.vocabulary or vocabulary_of(texts)
    if not words:
        raise ValueError("no words are known: set model_config.text_encoder.vocabulary, or vla_config.instruction")
    longest = max(texts, key=lambda each: len(split(each)), default="")
    if len(split(longest)) > encoder.max_words:
        text = f"model_config.text_encoder.max_words is {encoder.max_words}, but an instruction has"
        raise ValueError(f"{text} {len(split(longest))} words: {longest!r}; set it to at least that")
    return Words(tuple(words), encoder.max_words)


def _parts_of(model: ModelConfig, observation_space: gymnasium.Space) -> Mapping[str, gymnasium.Space]:
    """Return parts of the observation; ValueError if the model reads a missing one, or no picture."""
    parts = observation_space.spaces if isinstance(observation_space, gymnasium.spaces.Dict) else {}
    asked = (model.asks + name for name in (model.text, *model.predicts) if model.asks)
    missing = [name for name in (*model.images, *model.numbers, *model.predicts, *asked) if name not in parts]
    if missing:
        there = f"there is {', '.join(parts)}" if parts else "it is one array without names"
        raise ValueError(f"model_config names {', '.join(missing)}, but the observation has none: {there}")
    for name in model.images:
        shape = parts[name].shape or ()
        if parts[name].dtype != np.uint8 or len(shape) != 3 or shape[-1] != 3:
            raise ValueError(f"model_config.images: '{name}' must be uint8 [H, W, 3], got {parts[name]}")
    return parts


def _make_own(config: VLAConfig, action_space: gymnasium.Space, observation_space: gymnasium.Space) -> Any:
    """Make ``model_class(**model_config)``, with the spaces and the horizon if it takes them."""
    kind = find_policy(str(config.model_class)).make
    offered = {  # by name: a class takes those that it wants
        "action_space": action_space,
        "observation_space": observation_space,
        "action_spec": action_spec(action_space),
        "inference_horizon": config.inference_horizon,
        "instruction": config.instruction,
    }
    accepted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in offered.items() if name in accepted}, **dict(config.model))


def load_parts(policy: Any, params: Params, config: VLAConfig) -> tuple[Params, list[str]]:
    """Put the weights that ``config`` names into ``params``; return them with messages.

    ``model_path`` holds all trained parameters by dotted names; with ``lora`` those of the trunk become the frozen
    ones. Statistics of the normalizer, frozen encoders, and the layer of predictions are taken if it has them.
    Raises WeightsError for those that cannot be found or read, or do not fit; the text lists the names.
    """
    if isinstance(policy, LeRobotPolicy):
        return load(policy, params, config)
    params, notes = _load_encoders(policy, params) if isinstance(policy, VLAPolicy) else (params, [])
    if config.model_path is None:
        return params, notes
    like = policy.merge(params) if isinstance(policy, VLAPolicy) else params
    loaded = _fitted(like, load_weights(config.model_path), config.model_path)
    if isinstance(policy, VLAPolicy) and policy.model.lora is not None:
        loaded = policy.adopt(loaded, params)
    return loaded, [*notes, f"the weights are those of {config.model_path}"]


def _fitted(like: Params, given: dict[str, np.ndarray], source: str) -> Params:
    """Fit a file's arrays into ``like``; a checkpoint's names begin with the collection."""
    if any(name.startswith("params.") for name in given):
        given = {name.partition(".")[2]: x for name, x in given.items()}  # one name in both kinds of file
    flat = traverse_util.flatten_dict(like)
    held = {"params", *(path[0] for path in flat if ".".join(path[1:]) in given)}
    # for cloning alone: weights may have been saved without
    predicts = any(name.startswith(PREDICTION) for name in given)
    wanted = {path[1:]: x for path, x in flat.items() if path[0] in held and (predicts or path[1] != PREDICTION)}
    tree = traverse_util.unflatten_dict(wanted)
    fitted = traverse_util.flatten_dict(fit_weights(tree, given, may_be_left=(PREDICTION,), source=source))
    return dict(traverse_util.unflatten_dict({path: fitted.get(path[1:], x) for path, x in flat.items()}))


def _load_encoders(policy: VLAPolicy, params: Params) -> tuple[Params, list[str]]:
    image = policy.model.image_encoder
    if image.type != "efficientnet" or image.weights is None:
        return params, []
    features = load_efficientnet(image.weights, stride=image.stride)[1]["params"]  # one network for all pictures
    flat = traverse_util.flatten_dict(params)
    for path in {path[: path.index("features") + 1] for path in flat if path[0] == "frozen" and "features" in path}:
        flat |= {(*path, *name): x for name, x in traverse_util.flatten_dict(features).items()}
    return dict(traverse_util.unflatten_dict(flat)), [f"the image encoder is that of {image.weights}"]


def _problems(section: Any) -> Iterator[Problem]:
    if section.vla_config is None:
        yield Problem("policy.vla_config", "is missing: vla needs {model_config: {…}, inference_horizon: K}")
    elif section.init_from is not None and section.vla_config.model_path is not None:
        yield Problem("policy.init_from", "got both it and vla_config.model_path; keep one")


POLICY = PolicyKind(
    make=make,
    unread=dict.fromkeys(UNREAD, LEAVE_OUT),
    problems=_problems,
    exporters={VLAPolicy: "interop.exporters.vla:EXPORTER"},
)
