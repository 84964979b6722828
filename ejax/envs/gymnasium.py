"""Gymnasium's ids of ejax's tasks, by importing this: ``gymnasium.make("ejax.envs.gymnasium:ejax/PushCube-v0")``.

Gymnasium 1.0 gave up the entry points by which a package's ids were there without an import.
"""

from ejax.schema.registry import register_ids

register_ids()
