"""The parameters of a vision-language-action policy as a torch ``state_dict``. NumPy only.

A tensor's name is its dotted path among the Flax variables, the collection left out, with torch's spelling at the end:

    blocks_0.qkv.weight, .bias              a Linear's kernel, transposed to [out, in]
    blocks_0.norm_mlp.weight, .bias         a LayerNorm's scale
    word_embedding.weight                   an embedding
    encoders_image.features.stem.weight     a convolution's kernel, [rows, columns, in, out] as [out, in, rows, columns]
    normalizer.mean, word_place, …          anything else as it is

so that ``ejax.policies.pretrained.weights.fit_weights`` places them again, and ``policy.vla_config.model_path`` takes
such a file. Adapters are merged and what it predicts besides is left out: they leave no trace.
"""

from typing import Any

import numpy as np
from flax import traverse_util
from numpy.typing import NDArray

from ejax.policies.vla.network import PREDICTION
from ejax.policies.vla.policy import VLAPolicy
from ejax.types import Params


def vla_state_dict(policy: VLAPolicy, params: Params) -> dict[str, NDArray[Any]]:
    """The ``state_dict`` of ``interop.twin.vla.TorchVLA`` with these parameters, all arrays copies."""
    state_dict: dict[str, NDArray[Any]] = {}
    for path, x in traverse_util.flatten_dict(policy.merge(params)).items():
        *modules, last = path[1:]
        if modules[:1] == [PREDICTION]:
            continue
        array = np.asarray(x)
        if last == "kernel" and array.ndim in (2, 4):
            last, array = "weight", np.moveaxis(array, (-1, -2), (0, 1))
        elif last in ("scale", "embedding"):
            last = "weight"
        state_dict[".".join((*modules, last))] = np.array(array, order="C")
    return state_dict
