"""The multi-layer perceptron of EmbodiChain, with torch's initialization and arithmetic.

For each hidden size: Linear → [LayerNorm] → activation → [dropout]; then a Linear, and the last activation if any.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental.xla_metadata import set_xla_metadata
from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from ejax.numerics.checks import check_width
from ejax.numerics.platforms import by_platform
from ejax.schema.frozen import StrictModel
from ejax.types import Array, Key

Activation = Literal["relu", "elu", "tanh", "gelu", "silu", "swish", "none"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # torch's GELU is the exact one
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "none": lambda x: x,
}


class NetworkConfig(StrictModel):
    """``policy.actor.network_cfg`` and ``policy.critic.network_cfg``."""

    hidden_sizes: tuple[PositiveInt, ...]
    """Width of each hidden layer; empty: a linear map."""
    activation: Activation = "elu"
    """After each hidden layer, in any case; null means ``none``."""
    last_activation: Activation | None = None
    """After the output. None: the output is linear."""
    use_layernorm: bool = False
    """LayerNorm between each hidden layer and its activation."""
    dropout_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout is consistent: the same units are dropped when an action is taken and when it is learned from."""
    orthogonal_init: float | tuple[float, ...] | None = None
    """Gain of every Linear, or one for each: orthogonal weights and zero biases. None: torch's default."""

    @field_validator("activation", "last_activation", mode="before")
    @classmethod
    def _any_case(cls, name: Any, info: ValidationInfo) -> Any:
        if name is None and info.field_name == "activation":
            return "none"
        return name.lower() if isinstance(name, str) else name

    @model_validator(mode="after")
    def _one_gain_per_linear(self) -> "NetworkConfig":
        gains = self.orthogonal_init
        if isinstance(gains, tuple) and len(gains) != len(self.hidden_sizes) + 1:
            text = f"orthogonal_init needs one gain for each of the {len(self.hidden_sizes) + 1} Linear layers"
            raise ValueError(f"{text}, got {len(gains)}; use as many, or one number for all")
        return self


class MLP(nn.Module):
    """Multi-layer perceptron, ``[..., I] -> [..., *output_dim]``. Parameter names: ``linear_<i>``, ``layernorm_<i>``.

    ``config.orthogonal_init`` is EmbodiChain's ``init_orthogonal(scales)``: one gain or one for each Linear, biases 0,
    LayerNorm as it is; too few gains are refused. Raises ValueError for a size below 1, and if I is not ``input_dim``.
    """

    config: NetworkConfig
    output_dim: int | tuple[int, ...]
    """Size of the output, or its shape: (2, 3) gives [..., 2, 3], row by row."""
    input_dim: int | None = None
    """I, to be checked. None: any."""

    @nn.compact
    def __call__(self, x: Array, dropout_seed: Array | None = None) -> Array:
        """Evaluate x [..., I]; ``dropout_seed`` [...] uint32 alone decides a row's dropped units. None: no dropout."""
        c, shape = self.config, (self.output_dim,) if isinstance(self.output_dim, int) else tuple(self.output_dim)
        if min(shape, default=0) < 1:
            raise ValueError(f"output_dim must be a size or a shape of sizes of at least 1, got {self.output_dim}")
        if self.input_dim not in (None, x.shape[-1]):
            raise ValueError(f"the MLP was made for {self.input_dim} inputs, got {x.shape[-1]}: x is {list(x.shape)}")
        gains = c.orthogonal_init
        # programs of ``matmul_precision: bf16`` for a GPU keep hidden layers in bfloat16 for the backward pass;
        # parameters, their gradients, outputs and all sums stay float32
        narrow = jax.config.jax_default_matmul_precision == "BF16_BF16_F32"  # type: ignore[attr-defined]
        for i, size in enumerate((*c.hidden_sizes, math.prod(shape))):
            is_last, gain = i == len(c.hidden_sizes), gains[i] if isinstance(gains, tuple) else gains
            kernel, bias = _Linear(size, gain, name=f"linear_{i}")(x.shape[-1])
            if narrow:
                x = x if i == 0 else x.astype(jnp.bfloat16)
                x = _narrow(x, kernel, jnp.float32 if is_last else jnp.bfloat16)
            else:
                x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
                x = dense_product(x, kernel)
            x = x + widen(bias, x)
            if is_last:  # the output has no norm, activation or dropout of a hidden layer
                break
            if c.use_layernorm:
                x = nn.LayerNorm(epsilon=1e-5, name=f"layernorm_{i}")(x)  # torch's epsilon
            x = ACTIVATIONS[c.activation](x.astype(jnp.bfloat16) if narrow else x)
            if c.dropout_p > 0.0 and dropout_seed is not None:
                x = consistent_dropout(x, dropout_seed, layer=i, p=c.dropout_p)
        x = ACTIVATIONS[c.last_activation](x) if c.last_activation else x
        return x if isinstance(self.output_dim, int) else x.reshape(*x.shape[:-1], *shape)


class _Linear(nn.Module):
    """Weight [I, F] and bias [F] of a layer, with the names that ``nn.Dense`` gives them."""

    size: int
    gain: float | None
    """Scale of an orthogonal weight, with a zero bias. None: torch's default."""

    @nn.compact
    def __call__(self, num_inputs: int) -> tuple[Array, Array]:
        uniform, zeros = uniform_init(num_inputs), jax.nn.initializers.zeros
        kernel_init = uniform if self.gain is None else orthogonal(self.gain)
        check_width(self, "params", "kernel", num_inputs)
        kernel = self.param("kernel", kernel_init, (num_inputs, self.size))
        return kernel, self.param("bias", uniform if self.gain is None else zeros, (self.size,))


def build_mlp_from_cfg(module_cfg: Mapping[str, Any], in_dim: int, out_dim: int | tuple[int, ...]) -> MLP:
    """Make the MLP ``[..., in_dim] -> [..., *out_dim]`` of ``{"type": "mlp", "network_cfg": {…}}``, or with the keys of
    ``network_cfg`` next to ``type``. ValueError: another type, or keys or values of no ``NetworkConfig``.
    """
    block = dict(module_cfg)
    if str(kind := block.pop("type", "mlp")).lower() != "mlp":
        raise ValueError(f"type: got {kind!r}; allowed: mlp")
    fields = block.pop("network_cfg", None)
    if fields is not None and block:
        raise ValueError(f"got {', '.join(map(str, block))} next to network_cfg; allowed: type")
    return MLP(NetworkConfig.model_validate_json(json.dumps(block if fields is None else fields)), out_dim, in_dim)


def orthogonal(scale: float = 1.0) -> Callable[..., Array]:
    """Initialize as ``jax.nn.initializers.orthogonal`` does, under ``vmap`` one matrix at a time.

    jaxlib 0.10 factorizes a batch of matrices in the CPU client's thread pool, and waits for it in a thread of that
    pool: a program with as many batches as cores, which are two layers of several critics or members, never ends there.
    """

    def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        make = jax.nn.initializers.orthogonal(scale)
        return sequential_vmap(lambda one: make(one, shape, dtype))(key)

    return init


def uniform_init(size: int) -> Callable[..., Array]:
    """Initialize with U(±1/√size), torch's for a Linear of ``size`` inputs, and for a GRU or LSTM of that width."""
    bound = 1.0 / math.sqrt(size)

    def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def widen(x: Array, like: Array) -> Array:
    """Reshape [F] to [1, …, F], to go with ``like`` [..., F]."""
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


def dense_product(x: Array, w: Array, *args: Any, **kwargs: Any) -> Array:
    """Compute x·w in ``nn.Dense``'s call of ``lax.dot_general``."""
    del args, kwargs  # nn.Dense has the dimension numbers of a matrix product
    return _product(x, w)


def own_precision(x: Array) -> jax.lax.Precision | None:
    """Return the precision of products of x: a run's ``matmul_precision`` is for float32, and would widen bfloat16."""
    return jax.lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else None


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow(x: Array, w: Array, dtype: Any) -> Array:
    """Compute x·w in ``dtype``, with a float32 gradient of w. A network's input, float32, is rounded to TF32's 10 bits:
    bfloat16 would know a position of 0.5 m to 2 mm."""
    if x.dtype == jnp.float32:
        return jnp.matmul(x, w, precision=jax.lax.Precision.HIGH).astype(dtype)
    return _bf16_matmul(x, w, dtype)


def _narrow_backward(dtype: Any, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return _bf16_matmul(dy, w.T, x.dtype), _bf16_matmul(rows.T, dy_rows, jnp.float32)


def _bf16_matmul(a: Array, b: Array, dtype: Any) -> Array:
    narrow = (each.astype(jnp.bfloat16) for each in (a, b))
    return jnp.matmul(*narrow, precision=jax.lax.Precision.DEFAULT, preferred_element_type=dtype)


_narrow.defvjp(lambda x, w, dtype: (_narrow(x, w, dtype), (x, w)), _narrow_backward)


@jax.custom_vjp
def _product(x: Array, w: Array) -> Array:
    """Compute x·w, whose xᵀ·dy transposes x or dy in memory on a CPU; XLA's product over both first axes is slow."""
    return jnp.matmul(x, w, precision=own_precision(x))


def _product_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    precision = own_precision(x)
    rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])

    def plain(x: Array, dy: Array) -> Array:
        return jnp.matmul(x.T, dy, precision=precision)

    def transposing_x(x: Array, dy: Array) -> Array:
        # in a separate call, or XLA folds it into the product, or into what makes x: strides of rows miss the cache
        with set_xla_metadata(inlineable="false"):
            transpose = jax.jit(jnp.transpose)(x)
        return jnp.matmul(transpose, dy, precision=precision)

    def transposing_dy(x: Array, dy: Array) -> Array:
        # behind a barrier, or XLA makes xᵀ·dy of it
        return jax.lax.optimization_barrier(transposing_x(dy, x)).T

    on_cpu = transposing_dy if w.shape[1] < w.shape[0] else transposing_x  # the narrower of both is copied
    return jnp.matmul(dy, w.T, precision=precision), by_platform(cpu=on_cpu, gpu=plain)(rows, dy_rows)


_product.defvjp(lambda x, w: (_product(x, w), (x, w)), _product_backward)


def consistent_dropout(x: Array, seed: Array, *, layer: int, p: float) -> Array:
    """Drop units of x [..., F] by a mask that depends on the row's seed [...], uint32, and ``layer`` alone. Source:
    Hausknecht & Wagener 2022, Consistent Dropout."""

    def keep(row_seed: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(jax.random.key(row_seed), layer), 1.0 - p, x.shape[-1:])

    mask = jax.vmap(keep)(seed.reshape(-1)).reshape(x.shape)
    return jnp.where(mask, x / (1.0 - p), 0.0)  # scaled, so that the expectation stays
