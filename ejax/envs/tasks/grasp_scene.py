"""The model of PickPlaceRL and InstructedPlaceRL: a UR10 with a two-finger gripper and small cubes that it can hold."""

import functools
import itertools
from xml.etree import ElementTree as ET

from ejax.envs.manager.robots import Drives, PlacedRobot, make_ur
from ejax.envs.manager.scene import RigidObject, make_scene
from ejax.envs.task.mjcf import find_child
from ejax.envs.task.states import marker_name

HALF_EDGE = 0.025  # Half edge of the cube, m. It is grasped with the tool centre point at its centre.
HOME = (-0.0215027, -1.5389777, 2.0042863, -2.036105, -1.5707964, -0.0215027, 0.0, 0.0)
"""The tool at (−0.65, −0.15, 0.25) m."""
_TOOL = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.14), (0.0, 0.0, 0.0, 1.0))
"""The tool in the frame of the flange: amid the fingers' contact points."""
DRIVES = Drives(
    stiffness=(1e4, 1e4, 1e4, 5e3, 5e3, 5e3, 600.0, 600.0),
    damping=(300.0, 300.0, 200.0, 100.0, 100.0, 100.0, 40.0, 40.0),
    max_effort=(500.0, 500.0, 500.0, 500.0, 500.0, 500.0, 30.0, 30.0),
)
_ARMATURE = (2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5, 0.5)
"""kg·m² and kg: rotors behind gears. Without the fingers' they would sink into the cube."""
GOAL_MARKER = marker_name("goal")
"""The body that is drawn where the goal is."""


@functools.cache
def make_model(
    cubes: tuple[str, ...] = ("cube",), zones: tuple[str, ...] = ("goal",), zone_rgba: str | None = None
) -> str:
    """Compose the MJCF: cubes that can be grasped, and a disc for each zone (``marker_name``). Without the friction
    cone's ``impratio`` a cube creeps down between the fingers by 5 mm/s; with Euler's implicit damping a shaken one
    slides by 1 cm."""
    size = (HALF_EDGE, HALF_EDGE, HALF_EDGE)
    objects = tuple(RigidObject(uid=name, shape="box", size=size, mass=0.1, friction=1.0) for name in cubes)
    robot = PlacedRobot(robot=make_ur("ur10", _TOOL, gripper=True), drives=DRIVES, home=HOME)
    scene = make_scene(robot, objects, (0.0, 0.0, -9.81), 0.01, markers=zones)
    root = ET.fromstring(scene.xml)
    for name, armature in zip(scene.joints, _ARMATURE, strict=True):
        find_child(root, f".//joint[@name='{name}']").set("armature", str(armature))
    contacts = {"cone": "elliptic", "impratio": "10"}
    find_child(root, "option").attrib |= {**contacts, "iterations": "10", "ls_iterations": "20"}
    find_child(root, "option/flag").set("eulerdamp", "disable")
    for one, other in itertools.combinations(cubes, 2):
        _let_corners_touch(find_child(root, "contact"), one, other)
    for zone in zones:
        disc = find_child(root, f".//body[@name='{marker_name(zone)}']/geom")
        disc.attrib |= {"size": "0.055 0.001", "pos": f"0 0 {0.001 - HALF_EDGE}"}
        if zone_rgba is not None:
            disc.set("rgba", zone_rgba)
    return ET.tostring(root, encoding="unicode")


def _let_corners_touch(pairs: ET.Element, one: str, other: str) -> None:
    """Collide two boxes as corner balls against the other box: engines agree on them, and MJX compiles sooner."""
    pair = find_child(pairs, f"pair[@geom1='{one}'][@geom2='{other}']")
    pairs.remove(pair)
    for box, cube in ((one, other), (other, one)):
        for corner in range(8):
            names = {"geom1": f"{cube}_corner_{corner}", "geom2": box}
            ET.SubElement(pairs, "pair", {**pair.attrib, **names})
