"""The engine that ``physics: auto`` chooses; a run reports it, and keeps it when resumed."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax.config import RunConfig, parse_config
from ejax.envs.mujoco import choice
from ejax.envs.mujoco.choice import choose_engine
from ejax.envs.mujoco.engine import Physics
from ejax.run import train
from ejax.runtime.device import WARP_FLAG, device_problem
from ejax.training.environments import resolve_physics
from ejax.training.start import RunLocation, locate_run


def pretend(monkeypatch: pytest.MonkeyPatch, platform: str, *packages: str) -> None:
    """As if JAX computed there, with these packages installed."""
    monkeypatch.setattr(choice, "_platform", lambda: platform)
    monkeypatch.setattr(choice, "_installed", lambda package: "1.0" if package in packages else None)


def config(**env_cfg: Any) -> RunConfig:
    return parse_config(tiny(env="CartPoleRL", env_cfg={"max_episode_steps": 5, **env_cfg}))


def place_of(config: RunConfig, *origin: Any) -> RunLocation:
    with ExitStack() as locks:
        return locate_run(config, locks, *origin)


@cases(
    "platform packages engine why",
    ("cpu", ("warp-lang", "mujoco-warp"), "mujoco", "JAX computes on the CPU"),
    ("cuda", ("warp-lang", "mujoco-warp"), "warp", "JAX computes on CUDA, and mujoco-warp 1.0 is installed"),
    ("cuda", ("mujoco-mjx", "warp-lang"), "mjx", "Warp is not installed"),  # what Warp was with MuJoCo 3
    ("cuda", ("mujoco-mjx",), "mjx", "Warp is not installed: pip install -e '.[warp]' in ejax's folder"),
    ("cuda", (), "mjx", "Warp is not installed: pip install -e '.[warp]' in ejax's folder"),
    ("tpu", ("warp-lang", "mujoco-warp"), "mjx", "JAX computes on tpu, where Warp does not run"),
    ("rocm", ("warp-lang", "mujoco-warp"), "mjx", "JAX computes on rocm, where Warp does not run"),
)
def test_auto_goes_by_the_device_and_by_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, platform: str, packages: tuple[str, ...], engine: str, why: str
) -> None:
    pretend(monkeypatch, platform, *packages)
    assert choose_engine("auto").engine == engine and why in choose_engine("auto").why
    assert choose_engine("mujoco").engine == "mujoco"


def test_a_task_that_senses_contacts_has_warp_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", "warp-lang", "mujoco-warp")
    settled, (note,) = resolve_physics(parse_config(tiny(env="VelocityRL")))
    assert settled.env.cfg["physics"] == "warp" and note.startswith("physics: warp, since JAX computes on CUDA")


def test_warp_on_a_gpu_has_its_flag_of_xla_unless_the_user_gave_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ejax.runtime.device.find_spec", lambda name: name)
    jax.devices()  # XLA reads its flags once, when it starts, and would end the process at this one
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    device_problem("cpu")
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"
    device_problem("cuda:0")
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {WARP_FLAG}"
    pretend(monkeypatch, "cuda", "warp-lang", "mujoco-warp")
    trainer = config().trainer.model_copy(update={"device": "cuda"})
    assert (
        resolve_physics(config().model_copy(update={"trainer": trainer}))[1][-1] == f"XLA_FLAGS: --xla_a=1 {WARP_FLAG}"
    )
    monkeypatch.setenv("XLA_FLAGS", WARP_FLAG.replace("false", "true"))
    device_problem("cuda")
    assert os.environ["XLA_FLAGS"] == WARP_FLAG.replace("false", "true")


def test_here_auto_is_the_c_engine_also_where_another_device_is_the_default() -> None:
    assert Physics("cart_pole.xml").engine == "mujoco"
    with jax.default_device(jax.devices()[1]):
        assert choice._platform() == "cpu"


def test_the_config_of_a_run_names_the_engine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", "warp-lang", "mujoco-warp")
    settled, notes = resolve_physics(config())
    assert settled.env.cfg["physics"] == "warp" and settled.env.cfg["max_episode_steps"] == 5
    assert notes == ("physics: warp, since JAX computes on CUDA, and mujoco-warp 1.0 is installed",)
    assert resolve_physics(settled) == (settled, ())
    assert resolve_physics(parse_config(tiny()))[1] == ()  # PointMassRL has no engine


def test_the_engine_of_a_drawn_environment_is_settled_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", "mujoco-mjx")
    drawn = {"env": "CartPoleRL", "env_cfg": {"reset_range": 0.1}, "width": 8}
    settled, _ = resolve_physics(parse_config(tiny(env="RenderedEnv", env_cfg=drawn)))
    assert settled.env.cfg == {"reset_range": 0.1, "physics": "mjx"}


@cases(
    "given text",
    ({"physics": "warp"}, r"env.cfg.physics: got 'warp', which is not installed: pip install -e '\.\[warp\]'"),
    ({"physics": "mjx"}, r"env.cfg.physics: got 'mjx', which is not installed: pip install -e '\.\[mjx\]'"),
    ({}, r"env.cfg.physics: 'auto' is mjx here, which is not installed: pip install -e '\.\[mjx\]'"),
)
def test_an_engine_that_is_not_installed_is_refused_before_there_is_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], text: str
) -> None:
    pretend(monkeypatch, "cuda")
    refused(lambda: place_of(config(**given), None, tmp_path / "run"), match=text)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_keeps_the_engine_it_was_begun_with_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Begun on a CPU, gone on where auto means another engine."""
    run = train(config(), run_dir=tmp_path / "run").run_dir
    versions, resolved = (
        json.loads((run / "configs" / name).read_text()) for name in ("versions.json", "resolved.json")
    )
    assert versions["notes"] == ["physics: mujoco, since JAX computes on the CPU"]
    assert "physics" not in resolved["env"]["cfg"]

    pretend(monkeypatch, "cuda", "warp-lang", "mujoco-warp")
    note = "physics: mujoco, as the run was begun; auto means warp here, since JAX computes on CUDA, and"
    place = place_of(config(), "latest", run)
    assert place.config.env.cfg["physics"] == "mujoco" and place.notes[0].startswith(note)

    assert place.checkpoint is not None
    meta = json.loads((place.checkpoint / "meta.json").read_text())
    assert meta["config"]["env"]["cfg"]["physics"] == "mujoco"
