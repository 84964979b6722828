"""The drives that follow from a robot's motors.

    k = I·ω²        c = 2ζ·I·ω        action scale = F / (4·k)

with I the rotors' inertia seen from the joint, F the greatest torque, ω = 20π rad/s, ζ = 2. Source: mjlab 1.6, whose
Go1 and G1 EmbodiChain 0.3.2 has.
"""

import math
from collections.abc import Mapping

from ejax.envs.locomotion.robots import JointDrives, per_joint

_OMEGA = 2.0 * math.pi * 10.0
_ZETA = 2.0


def motor_drives(joints: tuple[str, ...], inertia: Mapping[str, float], effort: Mapping[str, float]) -> JointDrives:
    """Drives of the joints. ``inertia``: kg·m², ``effort``: N·m, by regular expressions of the joints' names."""
    armature, limit = per_joint(joints, inertia), per_joint(joints, effort)
    stiffness = tuple(each * _OMEGA**2 for each in armature)
    return JointDrives(
        armature=armature,
        max_effort=limit,
        stiffness=stiffness,
        damping=tuple(2.0 * _ZETA * each * _OMEGA for each in armature),
        action_scale=tuple(0.25 * f / k for f, k in zip(limit, stiffness, strict=True)),
    )
