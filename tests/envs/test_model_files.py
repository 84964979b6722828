"""A model whose files are no regular files is refused before MuJoCo, which would wait for them, opens one."""

import os
from pathlib import Path

import pytest
from case_tables import cases, refused

from ejax.envs.locomotion.catalog import velocity_task
from ejax.envs.locomotion.model import read_links
from ejax.envs.mujoco.engine import load_model
from ejax.envs.mujoco.models import check_model_files

ANYMAL_C = velocity_task("anymal_c").robot

GOOD = '<mujoco><worldbody><geom size="1"/></worldbody></mujoco>'
MESH = '<mujoco><compiler {0}/><asset><{1}/></asset><worldbody><geom type="mesh" mesh="a"/></worldbody></mujoco>'


@cases(
    "xml",
    '<mujoco><include file="pipe"/></mujoco>',
    '<mujoco><include file="sub/other.xml"/></mujoco>',
    '<mujoco><asset><model name="m" file="sub/other.xml"/></asset></mujoco>',
    MESH.format('meshdir="sub"', 'mesh name="a" file="pipe.stl"'),
    MESH.format('texturedir="sub"', 'texture name="a" type="cube" fileright="pipe.stl"'),
    MESH.format("", 'hfield name="a" file="pipe" size="1 1 1 1"'),
    MESH.format("", 'mesh name="a" file="{here}/pipe"'),
    '<robot name="r"><link name="l"><visual><geometry><mesh filename="package://x/pipe"/></geometry></visual></link></robot>',
    ids=["include", "in an include", "in a model", "mesh", "texture", "hfield", "absolute", "urdf"],
)
def test_a_pipe_is_refused_by_name(xml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("pipe", "sub/pipe.stl", "sub/include.xml"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "sub" / "other.xml").write_text('<mujoco><include file="include.xml"/></mujoco>')
    (tmp_path / "model.xml").write_text(xml.replace("{here}", str(tmp_path)))
    with pytest.raises(ValueError, match=r"the model's file .*(pipe|include).* is a named pipe, not a regular file"):
        load_model(str(tmp_path / "model.xml"))
    refused(read_links, tmp_path / "model.xml", ANYMAL_C, match="is a named pipe")
    monkeypatch.chdir(tmp_path)
    refused(lambda: load_model((tmp_path / "model.xml").read_text()), match="is a named pipe")


def test_the_size_of_an_include_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text('<mujoco><include file="large.xml"/></mujoco>')
    with (tmp_path / "large.xml").open("wb") as file:
        file.truncate(1 << 40)
    refused(load_model, str(tmp_path / "model.xml"), match=r"large.xml has \d+ bytes; at most \d+ are read")


def test_what_is_missing_or_no_xml_is_left_to_mujoco(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text('<mujoco><include file="model.xml"/><include file="none.xml"/></mujoco>')
    check_model_files(tmp_path / "model.xml")
    check_model_files(tmp_path / "none.xml")
    check_model_files("<mujoco>")
    check_model_files(GOOD)
    refused(load_model, str(tmp_path / "model.xml"), match=r"(none|model)\.xml")


def test_a_long_chain_of_includes_is_followed(tmp_path: Path) -> None:
    for i in range(1200):
        (tmp_path / f"{i}.xml").write_text(f'<mujoco><include file="{i + 1}.xml"/></mujoco>')
    os.mkfifo(tmp_path / "1200.xml")
    refused(check_model_files, tmp_path / "0.xml", match="is a named pipe")
