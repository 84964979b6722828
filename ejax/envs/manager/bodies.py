"""``rigid_object`` and ``background`` of a gym config: primitive bodies, which move, and which never move."""

import math
from collections.abc import Iterator
from typing import Any

from ejax.envs.task.scene import DEFAULT_FRICTION, RigidObject
from ejax.envs.terms.vocabulary import IGNORED
from ejax.schema.sections import Section

_ATTRIBUTE_GROUPS = ("mass_props", "rigid_props", "collision_props", "material_props")


def read_objects(root: Section) -> tuple[RigidObject, ...]:
    """Read the entries of both lists."""
    return (*_read_list(root, "rigid_object"), *_read_list(root, "background"))


def read_place(section: Section) -> dict[str, Any]:
    """Read where a body stands: ``position``, m, and ``rotation``, intrinsic Euler angles, rad."""
    position = section.numbers("init_pos", (0.0, 0.0, 0.0), 3)
    angles = section.numbers("init_rot", (0.0, 0.0, 0.0), 3)
    section.refuse("init_local_pose", "give init_pos and init_rot instead")
    return {"position": position, "rotation": tuple(map(math.radians, angles))}


def _read_list(root: Section, name: str) -> Iterator[RigidObject]:
    for section in root.listed(name):
        uid = section.take("uid")
        if not isinstance(uid, str):
            section.problem("uid", f"got {uid!r}; must be a name")
        with section.open("shape") as shape:
            kind, size = _read_shape(shape)
        body_type = section.take("body_type", "static" if name == "background" else "dynamic")
        if body_type not in ("dynamic", "static"):
            text = f"got {body_type!r}; ejax has dynamic and static bodies: its state holds no poses of other ones"
            section.problem("body_type", text)
        place = read_place(section)
        scale = section.data.get("body_scale")
        # a scale of 1 asks for nothing
        if isinstance(scale, list | tuple) and all(each == 1.0 for each in scale):
            section.take("body_scale")
        section.refuse("body_scale", "ejax scales no bodies: give the size in shape")
        section.ignore_all(IGNORED["rigid_object"])
        with section.open("attrs") as attrs:
            numbers = _read_attributes(attrs)
        if kind is not None:
            dynamic = body_type == "dynamic" and name != "background"
            yield RigidObject(uid=str(uid), shape=kind, size=size, dynamic=dynamic, **place, **numbers)


def _read_shape(shape: Section) -> tuple[Any, tuple[float, ...]]:
    kind = shape.take("shape_type")
    shape.ignore_all(IGNORED["rigid_object.shape"])
    if kind in ("Cube", "Box"):
        size = shape.numbers("size", (1.0, 1.0, 1.0), 3)
        if min(size) <= 0.0:
            shape.problem("size", f"got {size}; edges must be > 0")
        return "box", tuple(edge / 2.0 for edge in size)
    if kind == "Sphere":
        return "sphere", (shape.number("radius", 1.0, above=0.0),)
    if kind in ("Cylinder", "Capsule"):
        return kind.lower(), (shape.number("radius", 0.5, above=0.0), shape.number("height", 1.0, above=0.0) / 2.0)
    text = "meshes are EmbodiChain's files, which ejax does not have; " if kind == "Mesh" else ""
    shape.problem("shape_type", f"got {kind!r}; {text}allowed: Cube, Sphere, Cylinder, Capsule")
    shape.skip("its shape is not there")
    return None, ()


def _read_attributes(attrs: Section) -> dict[str, Any]:
    groups = [attrs.open(name) for name in _ATTRIBUTE_GROUPS if name in attrs]

    def holder(name: str) -> Section:
        return next((group for group in groups if name in group), attrs)

    friction = "dynamic_friction"
    # MuJoCo has one coefficient: that of sliding, if it is given
    if friction not in holder(friction) and "static_friction" in holder("static_friction"):
        friction = "static_friction"
    numbers: dict[str, Any] = {
        "collides": holder("enable_collision").flag("enable_collision", True),
        "mass": holder("mass").number("mass", 1.0, above=0.0),
        "friction": holder(friction).number(friction, DEFAULT_FRICTION, at_least=0.0),
        "linear_damping": holder("linear_damping").number("linear_damping", 0.0, at_least=0.0),
        "angular_damping": holder("angular_damping").number("angular_damping", 0.0, at_least=0.0),
    }
    ignored = {name: text for name, text in IGNORED["rigid_object.attrs"].items() if name != friction}
    for section in (*groups, attrs):
        section.ignore_all(ignored)
    for section in groups:
        section.close()
    return numbers
