"""Files of robots made of sticks, with the joints and bodies of H1-2 and MicroDuck, which no package has."""

from ejax.envs.locomotion.bipeds import H1_2, MICRODUCK
from ejax.envs.locomotion.robots import LeggedRobot

_DUCK_BODIES = dict(
    zip(
        MICRODUCK.joints,
        (
            *("yaw2roll", "hip_l", "upper_leg_left", "leg", "ankle_left"),
            *("neck", "neck_pitch", "yaw_roll_motion", "jaw_soft"),
            *("bearing_roll", "hip_l_2", "upper_leg_right", "leg_2", "ankle_right"),
        ),
        strict=True,
    )
)
_H1_2_LIMBS = (H1_2.joints[:6], H1_2.joints[6:12], H1_2.joints[12:20], H1_2.joints[20:])
_DUCK_LIMBS = (MICRODUCK.joints[:5], MICRODUCK.joints[9:], MICRODUCK.joints[5:9])


def h1_2_sticks() -> str:
    """As MJCF."""
    bodies = {joint: joint.replace("_joint", "_link") for joint in H1_2.joints}
    return _sticks(H1_2, _H1_2_LIMBS, bodies, length=0.16, mass=1.5)


def microduck_sticks() -> str:
    """As MJCF."""
    return _sticks(MICRODUCK, _DUCK_LIMBS, _DUCK_BODIES, length=0.022, mass=0.04)


def _sticks(
    robot: LeggedRobot, limbs: tuple[tuple[str, ...], ...], bodies: dict[str, str], *, length: float, mass: float
) -> str:
    """Two legs hang down, other limbs stand up; each link is a stick with a ball at its end."""
    text = f'<body name="{robot.base}" pos="0 0 {robot.height}">{_link(0.0, length, mass)}'
    for number, limb in enumerate(limbs):
        way = -length if number < 2 else length
        opening = "".join(
            f'<body name="{bodies[joint]}" pos="0 {(0.1 - 0.2 * number) * length * 6 if i == 0 else 0.0} '
            f'{way if i else 0.0}"><joint name="{joint}" axis="{"1 0 0" if "roll" in joint else "0 1 0"}" '
            f'range="-2 2"/>{_link(way, length, mass)}'
            for i, joint in enumerate(limb)
        )
        text += opening + "</body>" * len(limb)
    return f'<mujoco><compiler angle="radian"/><worldbody>{text}</body></worldbody></mujoco>'


def _link(way: float, length: float, mass: float) -> str:
    inertia = mass * length**2
    return (
        f'<inertial pos="0 0 {way / 2}" mass="{mass}" diaginertia="{inertia} {inertia} {inertia}"/>'
        f'<geom type="sphere" size="{0.1 * length}" pos="0 0 {way}"/>'
    )
