"""A robot from its own files: ``examples/crane``, a folder in MuJoCo Menagerie's layout with OBJ and STL meshes."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EPISODE, STEPS, tiny

from ejax import MuJoCoTask
from ejax.config import ConfigError, parse_config
from ejax.envs.mujoco.choice import how_to_install
from ejax.envs.mujoco.drawing import Appearance, render
from ejax.envs.mujoco.engine import Physics, PhysicsState, load_model
from ejax.envs.task.entities import home_of
from ejax.envs.wrappers.rendered import RenderedEnv
from ejax.evaluate import main as evaluate
from ejax.play.__main__ import main as play
from ejax.run import train
from ejax.training.environments import build_env
from ejax.types import Array

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "crane"
SCENE = str(FOLDER / "scene.xml")
WEDGE = """<mujoco><asset><mesh name="wedge" vertex="0 0 0 .1 0 0 0 .1 0 0 0 .1"/></asset><worldbody>{}
<body><freejoint/><geom type="mesh" mesh="wedge" {}/></body></worldbody></mujoco>"""


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def crane(**options: Any) -> Any:
    return __import__("own_robot").Crane(**options)


def test_the_script_makes_the_files_that_are_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    __import__("make_meshes").main(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in (FOLDER / "assets").iterdir()}
    assert {Path(name).suffix for name in made} == {".obj", ".stl", ".png"}
    assert sum(map(len, made.values())) < 60_000


def test_the_folder_opens_by_a_class_an_argument_and_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    cfg = {"id": "own_robot:Crane", "cfg": {"model": "crane/scene.xml"}}
    by_config: Any = build_env(parse_config(tiny() | {"env": cfg}))
    ways = [crane(), crane(model=FOLDER / "scene.xml"), MuJoCoTask(model="crane/scene.xml"), by_config]
    assert [env.asset for env in ways] == [SCENE] * 4
    units = [each.unit for each in ways[2].action_features]
    assert units == ["rad", "m/s", "m", "N m"]  # of a position, a velocity, a general and a motor
    assert ways[2].description.parameters["model"] == "crane/scene.xml" and "scene.xml" not in repr(ways[2])


@pytest.mark.parametrize(
    ("given", "message"),
    [("crane/scen.xml", r"no file crane/scen.xml in \S+"), (5, "env.cfg.model: got 5; must be a valid string")],
)
def test_a_config_without_such_a_file_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(tiny() | {"env": {"id": "own_robot:Crane", "cfg": {"model": given}}})


def test_meshes_collide() -> None:
    """The crate of half a height of 0.04 m falls and comes to rest on the floor."""
    home = home_of(SCENE, "")[0]
    qpos = jnp.asarray(home.qpos, jnp.float32).at[6].set(0.1)
    state = PhysicsState(qpos=qpos, qvel=jnp.zeros(load_model(SCENE).nv))
    after = Physics(SCENE, "mujoco", 200).step(state, jnp.asarray(home.ctrl, jnp.float32))
    assert after.qpos[6] == pytest.approx(0.04, abs=1e-3)


def fallen(engine: Any, world: str, parameters: dict[str, Array]) -> Array:
    """[7]: the wedge, 100 ms after it was let go 2 cm above the ground at z = 0."""
    start = jnp.array([0.0, 0.0, 0.02, 1.0, 0.0, 0.0, 0.0])
    state = PhysicsState(qpos=start, qvel=jnp.zeros(6), parameters=parameters)
    return Physics(WEDGE.format(world, ""), engine, 50).step(state, jnp.zeros(0)).qpos


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "shape"), [("mjx", "plane"), ("warp", "plane"), ("warp", "cylinder")])
def test_other_engines_collide_with_meshes_as_the_c_engine_does(engine: Any, shape: str) -> None:
    if how := how_to_install(engine):
        pytest.skip(f"{engine} is not installed: {how}")
    world = {
        "plane": '<geom type="plane" size="1 1 1"/>',
        "cylinder": '<geom type="cylinder" size=".5 .1" pos="0 0 -.1"/>',
    }
    mass = jnp.asarray(load_model(WEDGE.format(world[shape], "")).body_mass, jnp.float32)
    # numbers that follow from a mass are derived by MJX, which does not collide a mesh with a cylinder
    for parameters in ({}, {"body_mass": 2.0 * mass}):
        ends = [fallen(each, world[shape], parameters) for each in (engine, "mujoco")]
        np.testing.assert_allclose(*ends, atol=1e-3)
        assert ends[0][2] < 0.005  # it has met the ground, 2 cm below


@pytest.mark.parametrize(
    ("world", "geom", "message"),
    [
        ('<geom type="cylinder" size=".1 .1"/>', "", r"\(cylinder, mesh\) collisions not implemented; use mujoco"),
        ('<geom type="plane" size="1 1 1"/>', 'margin="0.01"', r"\(plane, mesh\) margin/gap not implemented"),
    ],
)
def test_what_mjx_cannot_do_with_a_mesh_is_an_error_that_names_it(world: str, geom: str, message: str) -> None:
    if how := how_to_install("mjx"):
        pytest.skip(f"MJX is not installed: {how}")
    still = PhysicsState(qpos=jnp.array([0.0, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0]), qvel=jnp.zeros(6))
    with pytest.raises(ValueError, match=f"physics 'mjx' does not simulate all of the model: {message}"):
        Physics(WEDGE.format(world, geom), "mjx", 1).step(still, jnp.zeros(0))


def test_meshes_and_their_textures_are_drawn_and_move() -> None:
    home, _ = home_of(SCENE, "")
    frames = [
        render(Appearance(asset=SCENE, qpos=jnp.asarray(home.qpos).at[number].add(by)), width=80, height=60)
        for number, by in ((0, 0.0), (0, 0.5), (5, 0.2))
    ]
    still = render(Appearance(asset=SCENE, qpos=jnp.asarray(home.qpos)), width=80, height=60)
    changed = [(frame != still).any(axis=-1).mean() for frame in frames]
    assert changed[0] == 0.0 and min(changed[1:]) > 0.01  # the jib; the crate
    red, green, blue = still.reshape(-1, 3).astype(int).T
    assert ((red - blue > 60) & (green - blue > 30)).mean() > 0.005  # yellow: of the jib and the stripes


def test_a_picture_may_be_larger_than_the_files_framebuffer() -> None:
    small = (
        '<mujoco><visual><global offwidth="32" offheight="8"/></visual><worldbody><geom size="1"/></worldbody></mujoco>'
    )
    assert render(Appearance(asset=small, qpos=jnp.zeros(0)), width=40, height=30).shape == (30, 40, 3)


def test_a_policy_that_sees_has_meshes_by_mujocos_renderer_alone() -> None:
    with pytest.raises(ValueError, match=r"the ray caster draws plane, .*is a mesh\. .*renderer: mujoco"):
        jax.eval_shape(RenderedEnv(crane(), renderer="raycast").reset, jax.random.key(0))
    env = RenderedEnv(crane(), width=16, height=12)
    _, obs = env.reset(jax.random.key(0))
    assert obs["image"].shape == (12, 16, 3) and np.asarray(obs["image"]).std() > 10.0


@pytest.mark.slow
def test_it_trains_is_evaluated_filmed_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("interop.export").main
    monkeypatch.chdir(tmp_path)
    cfg = {"model": os.path.relpath(SCENE), "episode_length": EPISODE}
    result = train(parse_config(tiny(tmp_path / "runs", "own_robot:Crane", env_cfg=cfg)))
    assert result.global_step == 2 * STEPS and np.isfinite(result.last_train_metrics["rewards/near"])
    run, trusted = str(result.run_dir), ["--trust", "own_robot:Crane"]
    assert evaluate([run, "--episodes", "2", *trusted]) == 0
    assert play([run, "--video", "crane.mp4", *trusted]) == 0 and Path("crane.mp4").stat().st_size > 1000
    assert export([run, "--to", "policy", "--formats", "stablehlo", *trusted]) == 0
    assert "N m" in Path("policy/contract.json").read_text(encoding="utf-8")
