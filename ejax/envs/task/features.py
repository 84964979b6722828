"""Names and units of a task's numbers: of an observation's parts, and of what actuators take."""

import re

import mujoco

from ejax.envs.description import Feature

LENGTHS = {int(mujoco.mjtJoint.mjJNT_HINGE): "rad", int(mujoco.mjtJoint.mjJNT_SLIDE): "m"}
"""Joints of one number, and its unit."""
_UNIT = re.compile(r"(?P<name>.*\S)\s*\[(?P<unit>[^\[\]]+)\]")


def name_numbers(name: str, shape: tuple[int, ...]) -> tuple[Feature, ...]:
    """The numbers of one part of an observation: ``"tip to goal [m]"`` with three of them is x, y and z, in m."""
    match = _UNIT.fullmatch(name)
    text, unit = (match["name"], match["unit"]) if match else (name, "1")
    if not shape:
        return (Feature(text, unit),)
    (size,) = shape
    letters = "wxyz" if size == 4 and "quaternion" in name else "xyz" if size == 3 else ""
    return tuple(Feature(f"{text} {letters[i] if letters else i}", unit) for i in range(size))


def describe_actuator(model: mujoco.MjModel, i: int) -> Feature:
    """What ±1 of an action means: a servo's target, a motor's force, or just its control."""
    low, high = model.actuator_ctrlrange[i]
    gain, bias = model.actuator_gainprm[i], model.actuator_biasprm[i]
    gear = model.actuator_gear[i]
    on_joint = model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT and not gear[1:].any()
    joint = int(model.actuator_trnid[i, 0])
    kind = int(model.jnt_type[joint]) if on_joint else -1
    length = LENGTHS.get(kind)
    fixed = model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED
    what, unit, scale = "control", "1", 1.0
    if length and fixed and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE:
        what, unit = ("torque", "N m") if length == "rad" else ("force", "N")
        scale = float(gain[0] * gear[0])
    elif length and fixed and gear[0] == 1.0 and bias[1] == -gain[0] and gain[0]:
        what, unit = "target angle" if length == "rad" else "target position", length
    elif length and fixed and gear[0] == 1.0 and not bias[1] and bias[2] == -gain[0]:
        what, unit = "target velocity", f"{length}/s"
    return Feature(f"{actuator_name(model, i)} {what}, -1 to 1 for {scale * low:g} to {scale * high:g}", unit)


def actuator_name(model: mujoco.MjModel, i: int) -> str:
    """An actuator's name; where it has none, its joint's."""
    if name := model.actuator(i).name:
        return name
    if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT:
        return model.joint(int(model.actuator_trnid[i, 0])).name or f"actuator {i}"
    return f"actuator {i}"
