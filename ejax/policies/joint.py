"""Actor and critic as one network of two members: a minibatch then costs a GPU half the kernels.

They are MLPs that differ at most in the width of the output, the activation after it and their initialization. The
narrower output is filled up with columns of zeros. A column of ones in the features stands for the first bias, so that
the first product adds it, and gives its gradient too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejax.numerics.kernels import is_small
from ejax.numerics.platforms import by_platform
from ejax.policies.mlp import ACTIVATIONS, MLP, NetworkConfig
from ejax.types import Array, PyTree


def are_alike(policy: Any, features: dict[str, Array]) -> bool:
    """Recognize networks, the fields of ``policy`` that ``features`` names, that can be computed jointly."""
    configs = [getattr(policy, name) for name in features]
    if not all(isinstance(config, NetworkConfig) for config in configs):
        return False
    return len({x.shape for x in features.values()}) == 1 and len({*map(_hidden, configs)}) == 1


def joint_outputs(
    policy: Any, sizes: dict[str, int], features: dict[str, Array], dropout_seed: Array | None
) -> dict[str, Array]:
    """Compute the outputs [..., size] of networks that ``are_alike``; a GPU computes small ones jointly.

    Args:
        sizes: of the output of each network.
        features: [..., F] of each, of one shape.
        dropout_seed: [...], or None: no dropout.
    """
    configs: dict[str, NetworkConfig] = {name: getattr(policy, name) for name in sizes}
    params = {name: policy.variables["params"][name] for name in sizes}

    def apart(params: dict[str, PyTree], features: dict[str, Array]) -> dict[str, Array]:
        networks = {name: MLP(configs[name], size, parent=None) for name, size in sizes.items()}
        return {name: _apply(network, params[name], features[name], dropout_seed) for name, network in networks.items()}

    def joint(params: dict[str, PyTree], features: dict[str, Array]) -> dict[str, Array]:
        width, config = max(sizes.values()), next(iter(configs.values()))
        stacked = _stack([_widened(params[name], len(config.hidden_sizes), width) for name in sizes])
        first = stacked["linear_0"]
        kernel = jnp.concatenate([first["kernel"], first["bias"][:, None]], axis=1)
        stacked = {**stacked, "linear_0": {"kernel": kernel, "bias": jnp.zeros_like(first["bias"])}}
        x = jnp.stack([features[name] for name in sizes])
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
        network = MLP(_hidden(config), width, parent=None)
        outputs = jax.vmap(lambda params, x: _apply(network, params, x, dropout_seed))(stacked, x)
        cut = {name: output[..., : sizes[name]] for name, output in zip(sizes, outputs, strict=True)}
        return {name: ACTIVATIONS[configs[name].last_activation or "none"](x) for name, x in cut.items()}

    outputs: dict[str, Array] = (by_platform(cpu=apart, gpu=joint) if is_small(params) else apart)(params, features)
    return outputs


def _hidden(config: NetworkConfig) -> NetworkConfig:
    """Keep of a config what concerns the hidden layers of existing parameters."""
    return config.model_copy(update={"last_activation": None, "orthogonal_init": None})


def _apply(network: MLP, params: PyTree, x: Array, dropout_seed: Array | None) -> Array:
    output: Array = network.apply({"params": params}, x, dropout_seed)  # type: ignore[assignment]  # it returns no state
    return output


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _widened(params: PyTree, last: int, width: int) -> PyTree:
    """Fill the output of an MLP's parameters up to ``width`` with zeros."""

    def widen(x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

    return {**params, f"linear_{last}": jax.tree.map(widen, params[f"linear_{last}"])}
