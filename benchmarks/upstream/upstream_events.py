"""``embodichain.lab.gym.envs.managers.randomization.physics``: ejax's draws of masses, written into mocks."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import torch
from upstream_words import translated

from ejax.envs.randomization.physics import PHYSICS
from ejax.envs.task.entities import ROBOT

ArticulationCfg = SimpleNamespace
"""``embodichain.lab.sim.cfg``'s, which mocks have."""
_WORDS = {"no link": "Not all regular expressions"}


@dataclass(frozen=True)
class _Physics:
    parameters: Any


def _draw(env: Any, names: list[str], masses: Any, uid: str, name: str, **params: Any) -> np.ndarray:
    """Draw the masses of a chain of links, or of one that is free, in an MJCF of the same names and masses [N, L]."""
    rows, key = [], jax.random.key(int(torch.randint(2**31, ())))
    for row, mass in enumerate(masses.reshape(len(masses), -1).tolist()):
        spec = mujoco.MjSpec()
        body = spec.worldbody
        for link, kg in zip(names, mass, strict=True):
            body = body.add_body(name=link)
            body.add_joint(name=f"{link}_joint", type=mujoco.mjtJoint.mjJNT_FREE if len(names) == 1 else _HINGE)
            body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[0.1, 0.0, 0.0], mass=kg)
            if len(names) > 1:
                spec.add_actuator(target=f"{link}_joint", trntype=mujoco.mjtTrn.mjTRN_JOINT)
        model = spec.compile()
        with translated(_WORDS):
            change = PHYSICS[name](model, {"uid": uid}, **params)
        before = {each: jnp.asarray(getattr(model, each), jnp.float32) for each in ("body_mass", "body_inertia")}
        rows.append(change.apply(_Physics(before), jax.random.fold_in(key, row), None).parameters["body_mass"][1:])
    return np.array(rows)


_HINGE = mujoco.mjtJoint.mjJNT_HINGE


def randomize_rigid_object_mass(env: Any, env_ids: Any, entity_cfg: Any, **params: Any) -> None:
    each = env.sim.get_rigid_object(entity_cfg.uid) or env.test_object
    masses = each.get_mass(env_ids)
    drawn = _draw(env, [each.uid], masses, entity_cfg.uid, "randomize_rigid_object_mass", **params)
    each.set_mass(torch.tensor(drawn)[:, 0], env_ids)


def randomize_articulation_mass(env: Any, env_ids: Any, entity_cfg: Any, **params: Any) -> None:
    each = env.sim.get_articulation(entity_cfg.uid)
    uid = entity_cfg.uid if each is None else ROBOT
    each = each or env.test_articulation
    masses = each.get_mass(env_ids=env_ids)
    drawn = _draw(env, each.link_names, masses, uid, "randomize_articulation_mass", **params)
    each.set_mass(torch.tensor(drawn), each.link_names, env_ids)
