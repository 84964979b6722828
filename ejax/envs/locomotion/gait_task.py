"""The task that Unitree's robots and MicroDuck share: follow velocities in a gait whose phase is observed.

Source: EmbodiChain 0.3.2, ``_reward_terms.py`` of its velocity tasks, and the numbers of its G1.
"""

import math
from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

from ejax.envs.locomotion.commands import CommandRanges

GAIT_ACTOR = ("base_ang_vel", "projected_gravity", "command", "phase", "joint_pos", "joint_vel", "action")
PRIVILEGED = ("foot_height", "foot_air_time", "foot_contact", "foot_force")
GAIT_CRITIC = (*GAIT_ACTOR, "base_lin_vel", *PRIVILEGED)
GAIT_NOISE: Mapping[str, float] = FrozenDict(base_ang_vel=0.2, projected_gravity=0.05, joint_pos=0.01, joint_vel=1.5)
GAIT_COMMAND = CommandRanges(
    lin_vel_x=(-0.5, 1.0), lin_vel_y=(-0.5, 0.5), ang_vel_z=(-1.0, 1.0), standing=0.05, heading=1.0, forward=0.0
)


def gait_rewards(
    *,
    offset: tuple[float, ...],
    standing: Mapping[str, float],
    walking: Mapping[str, float],
    running: Mapping[str, float],
    moves: float = 0.1,
) -> dict[str, dict[str, Any]]:
    """The terms, with their weights.

    Args:
        offset: of each foot, in the gait's cycle.
        standing: joints -> how far they may be from home (rad), for the three speeds.
        moves: m/s and rad/s added up: the command from which the gait counts.
    """
    active = {"command_threshold": moves}
    return {
        "track_linear_velocity": {"weight": 1.0, "std": 0.5, "vertical": 2.0},
        "track_angular_velocity": {"weight": 1.0, "std": math.sqrt(0.5), "tilting": 0.05},
        "body_orientation_l2": {"weight": -1.0},
        "pose": {
            "weight": 1.0,
            "walking_threshold": moves,
            "running_threshold": 1.5,
            "std_standing": standing,
            "std_walking": walking,
            "std_running": running,
        },
        "body_ang_vel": {"weight": -0.05},
        "angular_momentum": {"weight": -0.025},
        "is_terminated": {"weight": -200.0},
        "joint_acc_l2": {"weight": -2.5e-7},
        "joint_pos_limits": {"weight": -10.0},
        "action_rate_l2": {"weight": -0.05},
        "foot_gait": {"weight": 0.5, "period": 0.6, "offset": offset, "threshold": 0.56, **active},
        "foot_clearance": {"weight": -1.0, "target_height": 0.1, **active},
        "foot_slip": {"weight": -0.25, **active},
        "soft_landing": {"weight": -1e-3, **active},
        "stand_still": {"weight": -1.0, **active},
    }
