"""First weights of a ``vla`` policy: of its frozen encoders, and of the whole model."""

from typing import Any

import numpy as np
from flax import traverse_util

from ejax.policies.pretrained.efficientnet import load_efficientnet
from ejax.policies.pretrained.weights import fit_weights, load_weights
from ejax.policies.vla import lerobot_policy
from ejax.policies.vla.config import VLAConfig
from ejax.policies.vla.network import PREDICTION
from ejax.policies.vla.policy import VLAPolicy
from ejax.types import Params

_FEATURES = "features"


def load_parts(policy: Any, params: Params, config: VLAConfig) -> tuple[Params, list[str]]:
    """Put the weights that ``config`` names into ``params``; return them with messages.

    ``model_path`` holds all trained parameters by dotted names; with ``lora`` those of the trunk become the frozen
    ones. Statistics of the normalizer, frozen encoders, and the layer of predictions are taken if it has them.
    Raises WeightsError for those that cannot be found or read, or do not fit; the text lists the names.
    """
    notes: list[str] = []
    if isinstance(policy, lerobot_policy.LeRobotPolicy):
        return lerobot_policy.load(policy, params, config)
    if isinstance(policy, VLAPolicy):
        params, notes = _load_encoders(policy, params)
    if config.model_path is None:
        return params, notes
    whole = policy.without_lora() if isinstance(policy, VLAPolicy) else policy
    like = policy.merge(params) if isinstance(policy, VLAPolicy) else params
    loaded = _fitted(like, load_weights(config.model_path), config.model_path)
    if whole != policy:
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
    flat, notes = traverse_util.flatten_dict(params), []
    if image.type == "efficientnet" and image.weights is not None:
        features = load_efficientnet(image.weights, stride=image.stride)[1]["params"]  # one network for all pictures
        for path in {path[: path.index(_FEATURES) + 1] for path in flat if path[0] == "frozen" and _FEATURES in path}:
            for name, x in traverse_util.flatten_dict(features).items():
                flat[(*path, *name)] = x
        notes.append(f"the image encoder is that of {image.weights}")
    return dict(traverse_util.unflatten_dict(flat)), notes
