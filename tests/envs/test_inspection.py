"""``ejax check``: a model's units and actuators, what goes wrong with models, and a task played."""

import math
import re
from pathlib import Path

import pytest
from case_tables import cases

from ejax.envs.task.inspection import inspect_model
from ejax.preflight.check import main

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = """<mujoco><compiler angle="radian" autolimits="true"/>
<asset><mesh name="hull" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/></asset>
<worldbody><geom type="plane" size="1 1 1"/>
<body name="arm" pos="0 0 1"><joint name="elbow" range="-1.5 1.5" damping="0.1"/>
  <inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/><geom name="link" type="box" size=".1 .1 .1"/></body></worldbody>
<actuator><position name="drive" joint="elbow" kp="5" kv="1" ctrlrange="-1.5 1.5" forcerange="-3 3"/></actuator>
<keyframe><key name="home" qpos="0.2" ctrl="0.2"/></keyframe></mujoco>"""
INERTIAL, DRIVE = '<inertial pos="0 0 0" mass="1" diaginertia="1 1 1"/>', re.compile("<position.*/>")
MESH, BOX = re.findall("<mesh.*?/>", MODEL)[0], 'type="box" size=".1 .1 .1"'
NOTCHED = '<mesh name="hull" vertex="{}" face="{}"/>'.format(
    " ".join(f"{x} {y} {z}" for z in (0, 1) for x, y in ((0, 0), (3, 0), (0.2, 0.2), (0, 3))),
    "0 2 1 0 3 2 4 5 6 4 6 7 0 1 5 0 5 4 1 2 6 1 6 5 2 3 7 2 7 6 3 0 4 3 4 7",  # an L, whose hull is a triangle
)
ANGLES = [2.0 * math.pi * i / 150 for i in range(150)]
ROUND = '<mesh name="hull" vertex="{}"/>'.format(
    " ".join(f"{math.cos(a):.5f} {math.sin(a):.5f} {z}" for z in (0, 1) for a in ANGLES)
)


def warned(changes: dict[str, str]) -> list[str]:
    xml = MODEL
    for old, new in changes.items():
        assert old in xml
        xml = xml.replace(old, new)
    return inspect_model(xml).warnings


def test_a_sound_model_has_no_warnings_and_its_units_are_named() -> None:
    found = inspect_model(MODEL)
    assert not found.warnings and not found.errors
    joint, actuator = (rows[0] for _, rows in found.tables)
    assert joint == ("elbow", "hinge", "-1.5 to 1.5 rad", "0.1", "0", "0", "")
    assert actuator == ("drive", "position", "elbow", "target angle", "-1.5 to 1.5 rad", "kp 5, kv 1", "-3 to 3")
    assert found.facts["mass"] == "1 kg that moves" and found.facts["meshes"] == "none"


@cases(
    "written kind control gains",
    ('<motor name="d" joint="elbow" gear="2" ctrlrange="-1 1"/>', "motor", "torque -2 to 2 N m", "gain 1, gear 2"),
    ('<velocity name="d" joint="elbow" kv="4" ctrlrange="-1 1"/>', "velocity", "-1 to 1 rad/s", "kv 4"),
    ('<general name="d" joint="elbow" gainprm="5" biastype="affine" biasprm="0 -5 -1"/>', "position", "", "kp 5"),
    ('<general name="d" joint="elbow" gainprm="5" biastype="affine" biasprm="1 -2 0"/>', "general", "", "bias 1 -2"),
    ('<adhesion name="d" body="arm" gain="3" ctrlrange="0 1"/>', "adhesion", "0 to 1", "gain 3"),
)
def test_the_kind_of_an_actuator_is_what_it_does(written: str, kind: str, control: str, gains: str) -> None:
    xml = DRIVE.sub(written, MODEL).replace(' ctrl="0.2"', "")
    row = inspect_model(xml).tables[1][1][0]
    assert row[1] == kind and control in f"{row[3]} {row[4]}" and gains in row[5]


@cases(
    "changes message",
    ({'range="-1.5 1.5" d': 'range="-90 90" d'}, "elbow .*degrees need <compiler"),
    ({'angle="radian"': 'angle="degree"'}, r"elbow \(-0.02618 to 0.02618 rad\); radians need <compiler"),
    ({'ctrlrange="-1.5 1.5"': ""}, "drive: no ctrlrange, which actions of ±1 are scaled to"),
    ({'ctrlrange="-1.5 1.5"': 'ctrlrange="-90 90"'}, r"drive \(-90 to 90\): a ctrlrange far beyond the joint's"),
    ({'forcerange="-3 3"': ""}, "drive: a position drive without a force limit"),
    ({' kv="1"': "", ' damping="0.1"': ""}, "drive: an undamped position drive"),
    ({DRIVE.findall(MODEL)[0]: "", ' ctrl="0.2"': ""}, "the model has no actuators"),
    (
        {INERTIAL: "", "<geom name": '<geom type="sphere" size=".1" contype="0" conaffinity="0"/><geom name'},
        "arm: visual geoms have mass too",
    ),
    (
        {INERTIAL: "", 'size=".1 .1 .1"/>': f'size=".1 .1 .1" mass="0"/><body>{INERTIAL}</body>'},
        "arm: moves and has no mass",
    ),
    ({'qpos="0.2"': 'qpos="2"'}, r"keyframes beyond a joint's range: home \(elbow\)"),
    ({'ctrl="0.2"': 'ctrl="2"'}, r"keyframes beyond a ctrlrange: home \(drive\)"),
    ({'pos="0 0 1"': 'pos="0 0 0.05"'}, r"overlap at the start: arm and world \(\d+.\d mm\)"),
    ({MESH: NOTCHED, BOX: 'type="mesh" mesh="hull"'}, r"of a far greater volume: hull \(\d.\d times\)"),
    ({MESH: ROUND, BOX: 'type="mesh" mesh="hull"', 'pos="0 0 1"': 'pos="0 0 9"'}, r"slow on MJX: hull \(300\)"),
)
def test_what_commonly_goes_wrong_is_a_warning(changes: dict[str, str], message: str) -> None:
    texts = warned(changes)
    assert any(re.search(message, text) for text in texts), texts
    # degrees put the control and the keyframe out of range as well
    assert len(texts) == 1 or "angle" in str(changes)


@cases(
    "name text code message",
    ("robot.xml", MODEL, 0, r"drive +position +elbow +target angle"),
    ("robot.xml", MODEL.replace('kv="1"', 'kv="1" timeconst="1"'), 2, r"error: .*actuator 'drive' has an activation"),
    ("robot.xml", MODEL.replace('qpos="0.2"', 'qpos="0.2 1"'), 2, "keyframe 'home': invalid qpos size"),
    ("robot.xml", MODEL.replace('joint="elbow"', 'joint="knee"'), 2, "knee"),
    ("robot.xml", "no model", 2, "XML"),
)
def test_a_file_is_reported(
    name: str, text: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == code
    shown = capsys.readouterr()
    assert re.search(message, shown.out + shown.err)


def test_a_task_is_checked_by_name_with_its_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert main(["own_robot:Crane", "env.cfg.episode_length=3"]) == 0
    shown = capsys.readouterr().out
    assert re.search("trolley +velocity +trolley", shown) and "grab (1.5 times)" in shown
    assert "Crane fits: shapes and types of reset and step" in shown


@cases(
    "words message",
    (["own_robot:Cran"], "has no 'Cran'. Did you mean 'Crane'?"),
    (["own_robot.yml"], "own_robot.yml"),
    ([str(EXAMPLES / "crane" / "scene.xml"), "env.cfg.physics=mjx"], "a robot's file has no options"),
    ([str(EXAMPLES / "crane" / "scene.xml"), "--keyframe", "homo"], "no keyframe 'homo'; there is home"),
)
def test_what_cannot_be_checked_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert main(words) == 2
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
