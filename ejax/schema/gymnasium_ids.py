"""Ids of Gymnasium for registered environments: PushCubeRL is ``ejax/PushCube-v0``. Imports neither JAX nor a task."""

import re

from ejax.schema.registry import ENVS

_CLASSES = "ejax.envs.adapters.to_gymnasium"
_NAMESPACE, _NAME = "ejax", re.compile(r"[\w:.-]+?(-v\d+)?")


def register_ids() -> None:
    """Register an id for every environment's name. Again, it changes nothing."""
    for name in ENVS:
        register_id(name)


def register_id(name: str) -> None:
    """Register ``ejax/<name without RL>-v0``, or without the version that the name has itself. A name that Gymnasium
    cannot write gets none."""
    from gymnasium.envs import registration

    parts = _NAME.fullmatch(name)
    if parts is None:
        return
    key = f"{_NAMESPACE}/{name if parts[1] else name.removesuffix('RL') + '-v0'}"
    # Gymnasium warns where it would replace one; which environment the name means, ejax's own registry decides
    registration.registry.pop(key, None)
    registration.register(
        key,
        entry_point=f"{_CLASSES}:EjaxEnv",
        vector_entry_point=f"{_CLASSES}:EjaxVectorEnv",
        kwargs={"task": name},
    )
