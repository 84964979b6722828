"""Files of robots made of sticks, with the joints and bodies of robots whose files are not here."""

from collections.abc import Mapping
from types import MappingProxyType

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.robots import LeggedRobot

G1 = velocity_task("g1").robot
H1_2 = velocity_task("h1_2").robot
MICRODUCK = velocity_task("microduck").robot
ANYMAL_C = velocity_task("anymal_c").robot
GO1 = velocity_task("go1").robot
GO2 = velocity_task("go2").robot

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
    """Build the H1-2 as MJCF."""
    bodies = {joint: joint.replace("_joint", "_link") for joint in H1_2.joints}
    return _sticks(H1_2, _H1_2_LIMBS, bodies, length=0.16, mass=1.5)


def microduck_sticks() -> str:
    """Build the Microduck as MJCF."""
    return _sticks(MICRODUCK, _DUCK_LIMBS, _DUCK_BODIES, length=0.022, mass=0.04)


def g1_sticks() -> str:
    """Build the G1 as MJCF."""
    bodies = {joint: joint.replace("_joint", "_link") for joint in G1.joints} | {"waist_pitch_joint": "torso_link"}
    balls = {}
    for side in ("left", "right"):
        balls[f"{side}_ankle_roll_link"] = tuple(f"{side}_foot{i}_collision" for i in range(1, 8))
        for link, part in (("knee", "shin"), ("hip_yaw", "thigh"), ("wrist_yaw", "hand")):
            balls[f"{side}_{link}_link"] = (f"{side}_{part}_collision",)
    limbs = (G1.joints[:6], G1.joints[6:12], G1.joints[12:22], G1.joints[22:])
    return _sticks(G1, limbs, bodies, length=0.125, mass=1.0, balls=balls)


def go1_sticks() -> str:
    """Build the Go1 as MJCF."""
    balls = {f"{leg}_calf": (f"{leg}_foot_collision",) for leg in ("FR", "FL", "RR", "RL")}
    return _dog(GO1, balls | {"trunk": ("trunk_collision", "head_collision")}, {})


def go2_sticks() -> str:
    """Build the Go2 as MJCF."""
    return _dog(GO2, {}, {})


def anymal_c_sticks() -> str:
    """Build the ANYmal C as MJCF."""
    balls = {f"{leg}_SHANK": (f"{leg}_FOOT_0_collision", f"{leg}_FOOT_1_collision") for leg in ("LF", "LH", "RF", "RH")}
    return _dog(ANYMAL_C, balls, {"HAA": "HIP", "HFE": "THIGH", "KFE": "SHANK"})


def _dog(robot: LeggedRobot, balls: dict[str, tuple[str, ...]], parts: dict[str, str]) -> str:
    """Four legs of three links, called as their joints are, but for ``parts``."""
    bodies = {}
    for joint in robot.joints:
        leg, part = joint.removesuffix("_joint").split("_")
        bodies[joint] = f"{leg}_{parts.get(part, part)}"
    limbs = tuple(robot.joints[i : i + 3] for i in range(0, 12, 3))
    return _sticks(robot, limbs, bodies, length=robot.height / 3, mass=1.0, num_legs=4, balls=balls)


def _sticks(
    robot: LeggedRobot,
    limbs: tuple[tuple[str, ...], ...],
    bodies: dict[str, str],
    *,
    length: float,
    mass: float,
    num_legs: int = 2,
    balls: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> str:
    """Legs hang down, other limbs stand up; each link is a stick with a ball at its end.

    Args:
        balls: of a link that has several, or one with a name: their names.
    """

    def link(body: str, way: float) -> str:
        return _link(way, length, mass, balls.get(body, ("",)))

    text = f'<body name="{robot.base}" pos="0 0 {robot.height}">{link(robot.base, 0.0)}'
    for number, limb in enumerate(limbs):
        way = -length if number < num_legs else length
        opening = "".join(
            f'<body name="{bodies[joint]}" pos="0 {(0.1 - 0.2 * number) * length * 6 if i == 0 else 0.0} '
            f'{way if i else 0.0}"><joint name="{joint}" axis="{"1 0 0" if "roll" in joint else "0 1 0"}" '
            f'range="-2 2"/>{link(bodies[joint], way)}'
            for i, joint in enumerate(limb)
        )
        text += opening + "</body>" * len(limb)
    return f'<mujoco><compiler angle="radian"/><worldbody>{text}</body></worldbody></mujoco>'


def _link(way: float, length: float, mass: float, balls: tuple[str, ...]) -> str:
    inertia = mass * length**2
    text = f'<inertial pos="0 0 {way / 2}" mass="{mass}" diaginertia="{inertia} {inertia} {inertia}"/>'
    for i, ball in enumerate(balls):
        name = f' name="{ball}"' if ball else ""
        text += f'<geom type="sphere" size="{0.1 * length}" pos="{0.1 * length * i if i else 0} 0 {way}"{name}/>'
    return text
