"""Cameras of a gym config, ``sensor``; source: ``Camera`` and ``StereoCamera`` of EmbodiChain 0.3.2.

Axes are OpenGL's: x right, y up, the line of sight along −z. ``extrinsics`` place a camera by ``eye``, ``target`` and
``up``, or by ``pos`` and ``quat`` (x y z w), in the arena or in the frame of the link ``parent``. Without a parent
``quat`` turns x right, y down, z forward, as in EmbodiChain.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ejax.envs.mujoco.kinematics import transform
from ejax.envs.task.scene import Lens, SensorCamera
from ejax.envs.terms.vocabulary import IGNORED
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.sections import Section

_INTRINSICS = (600.0, 600.0, 320.0, 240.0)
_LINKS = {"ee_link": "flange", "base_link": "base"}
"""EmbodiChain's link -> ejax's body in the same place."""
_COLOURS_ONLY = "only colour pictures are supported; set it to false"
_REFUSED = {
    "enable_depth": _COLOURS_ONLY,
    "enable_mask": "masks are not supported: MuJoCo numbers bodies differently than EmbodiChain; set it to false",
    "enable_normal": "normals are not supported: MuJoCo does not render them; set it to false",
    "enable_position": _COLOURS_ONLY,
    "enable_disparity": "disparities are not supported: they need depth; set it to false",
}
_SENSORS = ("Camera", "StereoCamera")


def read_cameras(root: Section, links: tuple[str, ...], robot_uid: str) -> tuple[SensorCamera, ...]:
    """Read ``sensor``; ``links`` are the robot's bodies."""
    read = [_read_camera(section, links, robot_uid) for section in root.listed("sensor")]
    cameras = tuple(each for each in read if each is not None)
    names = [each.uid for each in cameras]
    for name in {name for name in names if names.count(name) > 1}:
        root.problem("sensor", f"two are called '{name}'; each needs its own uid")
    return cameras


def names_camera(value: Any, uids: tuple[str, ...]) -> bool:
    """Return True where a functor's parameters name a camera."""
    if isinstance(value, Mapping):
        return any(key in uids or names_camera(each, uids) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any(names_camera(each, uids) for each in value)
    return isinstance(value, str) and value in uids


def _read_camera(section: Section, links: tuple[str, ...], robot_uid: str) -> SensorCamera | None:
    if section.data.get("sensor_type") == "ContactSensor":
        text = "a gym config's scene has no observation of contacts here; velocity tasks sense theirs"
        section.problem("sensor_type", text)
    kind, uid = section.choice("sensor_type", _SENSORS, "Camera"), section.take("uid")
    if kind not in _SENSORS:
        section.skip("its sensor is missing")
        return None
    if not isinstance(uid, str):
        section.problem("uid", f"got {short_repr(uid)}; must be a name")
    for name, text in _REFUSED.items():
        if section.take(name, False) is not False:
            section.problem(name, text)
    section.ignore_all(IGNORED["sensor"])
    width, height = section.integer("width", 640, at_least=1), section.integer("height", 480, at_least=1)
    pictures = section.flag("enable_color", True)
    lenses: tuple[Lens, ...] = (Lens("color", _read_intrinsics(section, "intrinsics"), (0.0, 0.0, 0.0)),)
    if kind == "StereoCamera":
        x, y, z = (each / 2.0 for each in section.numbers("left_to_right_pos", (0.05, 0.0, 0.0), 3))
        section.ignore_all(IGNORED["sensor.stereo"])
        right = Lens("color_right", _read_intrinsics(section, "intrinsics_right"), (x, y, z))
        # the camera's own place is amid the two
        lenses = (lenses[0]._replace(shift=(-x, -y, -z)), right)
    with section.open("extrinsics") as extrinsics:
        parent = _read_parent(extrinsics, links, robot_uid)
        pose = _read_pose(extrinsics, mounted=parent is not None)
    if not pictures:
        section.note("enable_color", "false: the observation has no picture of it")
    return SensorCamera(
        uid=str(uid),
        width=width,
        height=height,
        pose=tuple(tuple(row) for row in pose.tolist()),
        parent=parent,
        lenses=lenses,
        pictures=pictures,
    )


def _read_intrinsics(section: Section, name: str) -> tuple[float, float, float, float]:
    fx, fy, cx, cy = section.numbers(name, _INTRINSICS, 4)
    if min(fx, fy) <= 0.0:
        section.problem(name, f"got {[fx, fy, cx, cy]}: fx and fy must be > 0, in pixels")
        return _INTRINSICS
    return fx, fy, cx, cy


def _read_parent(section: Section, links: tuple[str, ...], robot_uid: str) -> str | None:
    name = section.take("parent")
    if name is None:
        return None
    # EmbodiChain writes a link with its robot, or alone
    link = str(name).removeprefix(f"{robot_uid}/")
    body = link if link in links else _LINKS.get(link, "")
    if body in links:
        return body
    there = [*links, *(each for each, own in _LINKS.items() if own in links)]
    text = f"the robot has no link '{name}'; ejax's model of it has {', '.join(there)}{did_you_mean(link, there)}"
    section.problem("parent", text)
    return None


def _read_pose(section: Section, *, mounted: bool) -> NDArray[np.float64]:
    position, quat = section.numbers("pos", (0.0, 0.0, 0.0), 3), section.numbers("quat", (0.0, 0.0, 0.0, 1.0), 4)
    if "eye" not in section:
        for name in ("target", "up"):
            if name in section:
                section.problem(name, "is read only together with eye, which is missing")
        norm = float(np.linalg.norm(quat))
        if norm < 1e-6:
            section.problem("quat", f"got {list(quat)}; must be a rotation, x y z w")
            return np.eye(4)
        x, y, z, w = (each / norm for each in quat)
        pose = transform(np.array(position), np.array([w, x, y, z]))
        if not mounted:
            pose[:3, 1:3] *= -1.0  # x right, y down, z forward -> OpenGL's axes
        return pose
    for name in ("pos", "quat"):
        if name in section:
            section.note(name, "no effect together with eye", "without effect")
    eye, up = section.numbers("eye", (0.0, 0.0, 0.0), 3), section.numbers("up", (0.0, 0.0, 1.0), 3)
    pose = np.eye(4)
    if "target" not in section:
        section.problem("target", "is missing: eye needs a point to look at")
        return pose
    target = section.numbers("target", (0.0, 0.0, 0.0), 3)
    if eye == target:
        section.problem("target", f"eye and target are both {list(eye)}; set it to a point to look at")
        return pose
    forward = np.subtract(target, eye) / np.linalg.norm(np.subtract(target, eye))
    right = np.cross(forward, up)
    if np.linalg.norm(right) < 1e-6:  # along ``up``, what points up in the picture is EmbodiChain's choice: −x, or −y
        right = np.cross(np.eye(3)[0 if abs(forward[1]) > abs(forward[0]) else 1], forward)
    right /= np.linalg.norm(right)
    pose[:3] = np.stack([right, np.cross(right, forward), -forward, eye], axis=1)
    return pose
