"""A task's MJCF: its file, where episodes start, and the names and units of a task's numbers."""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.description import Feature
from ejax.envs.mujoco.engine import load_model
from ejax.envs.task.entities import constrained_joints, home_of
from ejax.schema.messages import did_you_mean, shorten
from ejax.schema.plain_files import expanded

LENGTHS = {int(mujoco.mjtJoint.mjJNT_HINGE): "rad", int(mujoco.mjtJoint.mjJNT_SLIDE): "m"}
"""Joints of one number, and its unit."""
_UNIT = re.compile(r"(?P<name>.*\S)\s*\[(?P<unit>[^\[\]]+)\]")


def find_model(given: str, module: str) -> str:
    """Return MJCF as text unchanged, and a file as its absolute path. Raises ValueError: no model, or no such file."""
    if not given:
        raise ValueError("the task has no model; set model = 'robot.xml', a file beside the class's, or MJCF as text")
    if given.lstrip().startswith("<"):
        return given
    given = expanded(given)
    file = getattr(sys.modules.get(module), "__file__", None)
    # a notebook's module has no file
    places = [*([Path(file).parent] if file else []), Path.cwd()]
    found = next((path for place in places if (path := place / given).is_file()), None)
    if found is None:
        near = sorted({path.name for place in places for path in place.glob("*.xml")})
        looked = " and in ".join(dict.fromkeys(map(str, places)))
        raise ValueError(f"no file {given} in {looked}{did_you_mean(given, near)}")
    return str(found.resolve())


def start_noise_of(asset: str, size: float) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """[nq] each: how far a number may be moved, and its bounds."""
    model = load_model(asset)
    # quaternions and free bodies stay: noise on them would leave the unit sphere, or let things overlap
    noise, low, high = (np.full(model.nq, x, np.float32) for x in (0.0, -np.inf, np.inf))
    for i in range(model.njnt):
        if int(model.jnt_type[i]) in LENGTHS and i not in constrained_joints(model):
            noise[model.jnt_qposadr[i]] = size
            if model.jnt_limited[i]:
                low[model.jnt_qposadr[i]], high[model.jnt_qposadr[i]] = model.jnt_range[i]
    return noise, low, high


def start_changed(asset: str, keyframe: str | int, noise: float) -> Iterator[str]:
    """Name what an episode's start does without."""
    if time := home_of(asset, keyframe)[0].time:
        yield f"the keyframe's time of {time:g} s is not read: episodes begin at 0"
    model = load_model(asset)
    left = [name for i, name in constrained_joints(model).items() if int(model.jnt_type[i]) in LENGTHS]
    if noise and left:
        yield f"start_noise leaves out {shorten(', '.join(left))}, under an equality or a tendon's limits"


def check_actuators(model: mujoco.MjModel, num_actions: int, own_control: bool) -> None:
    """Raise ValueError at actuators that actions cannot be scaled to. ``num_actions`` 0: they are the actuators'."""
    if not model.nu:
        raise ValueError("the model has no actuators; add an <actuator> section to its MJCF")
    if own_control:
        return
    if num_actions not in (0, model.nu):
        remedy = "define control(self, world, action), which turns the former into the latter"
        raise ValueError(f"{num_actions} actions for {model.nu} actuators; {remedy}")
    for i in range(model.nu):
        if not model.actuator_ctrllimited[i]:
            lacks = "has no ctrlrange, which actions of ±1 are scaled to"
            remedy = "write one into the MJCF, or define control(self, world, action)"
            raise ValueError(f"actuator {actuator_name(model, i)!r} {lacks}; {remedy}")


def name_numbers(name: str, shape: tuple[int, ...]) -> tuple[Feature, ...]:
    """Name the numbers of one part of an observation: ``"tip to goal [m]"`` with three of them is x, y and z, in m."""
    match = _UNIT.fullmatch(name)
    text, unit = (match["name"], match["unit"]) if match else (name, "1")
    if not shape:
        return (Feature(text, unit),)
    (size,) = shape
    # four numbers are a quaternion by name only; three are always taken for axes
    letters = "wxyz" if size == 4 and "quaternion" in name else "xyz" if size == 3 else ""
    return tuple(Feature(f"{text} {letters[i] if letters else i}", unit) for i in range(size))


def describe_actuator(model: mujoco.MjModel, i: int) -> Feature:
    """Name the meaning of ±1 of an action: a servo's target, a motor's force, or just its control."""
    low, high = model.actuator_ctrlrange[i]
    what, unit, scale = unit_of_actuator(model, i)
    return Feature(f"{actuator_name(model, i)} {what}, -1 to 1 for {scale * low:g} to {scale * high:g}", unit)


def actuator_kind(model: mujoco.MjModel, i: int) -> str:
    """Name the element of MJCF that an actuator is like, whichever it was written as: ``position``, ``velocity``,
    ``motor``, ``muscle``, ``adhesion``; ``general`` is like none of them."""
    gain, bias = model.actuator_gainprm[i, 0], model.actuator_biasprm[i]
    if model.actuator_gaintype[i] != mujoco.mjtGain.mjGAIN_FIXED:
        return "muscle" if model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_MUSCLE else "general"
    if model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE:
        return "adhesion" if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_BODY else "motor"
    if gain and bias[1] == -gain:
        return "position"
    return "velocity" if gain and not bias[1] and bias[2] == -gain else "general"


def unit_of_actuator(model: mujoco.MjModel, i: int) -> tuple[str, str, float]:
    """Name what an actuator's control is, its unit, and that many of it that 1 of control is."""
    gear, kind = model.actuator_gear[i], actuator_kind(model, i)
    on_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT and not gear[1:].any()
    length = LENGTHS.get(int(model.jnt_type[int(model.actuator_trnid[i, 0])]) if on_joint else -1)
    if length and kind == "motor":
        scale = float(model.actuator_gainprm[i, 0] * gear[0])
        return ("torque", "N m", scale) if length == "rad" else ("force", "N", scale)
    if length and gear[0] == 1.0 and kind == "position":
        return "target angle" if length == "rad" else "target position", length, 1.0
    if length and gear[0] == 1.0 and kind == "velocity":
        return "target velocity", f"{length}/s", 1.0
    return "control", "1", 1.0  # other forms have no unit to name


def actuator_name(model: mujoco.MjModel, i: int) -> str:
    """Return an actuator's name, or that of its joint where it has none."""
    on_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT
    joint = model.joint(int(model.actuator_trnid[i, 0])).name if on_joint else ""
    return model.actuator(i).name or joint or f"actuator {i}"


def to_text(numbers: Iterable[float]) -> str:
    """Write numbers as an MJCF's attribute."""
    return " ".join(repr(float(number)) for number in numbers)


def find_child(element: ET.Element, path: str) -> ET.Element:
    """Find an element of an MJCF. Raises ValueError: it has none."""
    child = element.find(path)
    if child is None:
        raise ValueError(f"the MJCF of <{element.tag}> has no {path}")
    return child
