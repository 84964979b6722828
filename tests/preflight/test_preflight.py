"""Preflight: the programs of training and evaluation, for devices that are not here; what it finds, and refuses."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import yaml
from case_tables import cases, refused
from tiny import EVALUATED, NUM_ENVS, STEPS, tiny, tiny_sac

from ejax.config import ConfigError, load_config, parse_config
from ejax.preflight import run
from ejax.preflight.__main__ import main
from ejax.preflight.run import (
    USABLE,
    Memory,
    Program,
    compiler_problem,
    estimate,
    for_each_program,
    measure_program,
    on_accelerator,
    replay_facts,
)
from ejax.preflight.targets import CARDS, find_card
from ejax.training.build import build

H100 = CARDS["h100"]
ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(compiler_problem() is not None, reason=compiler_problem() or "")


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    """Compile a tiny run for the CPU: everything but the card is as for a GPU."""
    found = for_each_program(partial(measure_program, H100, 1), parse_config(tiny(**EVALUATED)), jax.devices()[:1])
    return {name: facts for name, _, facts in found}


def memory(peak: int, fixed: int = 0, replay: int = 0) -> Memory:
    return Memory(0, 0, 0, peak, fixed, replay)


def test_training_and_evaluation_are_compiled_and_their_work_is_counted(programs: dict[str, dict[str, Any]]) -> None:
    assert list(programs) == ["train", "evaluate"]
    train, evaluate = programs.values()
    assert train["product_flops"].keys() == {"f32"}
    assert train["product_flops"]["f32"] > evaluate["product_flops"]["f32"] > 0
    assert train["bounds_s"]["memory"] == pytest.approx(train["bytes"] / H100.bandwidth, rel=1e-4)
    assert train["limited_by"] in train["bounds_s"]
    assert json.loads(json.dumps(train)) == train


@pytest.mark.slow
def test_without_evaluation_there_is_no_program_for_it() -> None:
    config = parse_config(tiny(collector={"mode": "host"}))
    assert for_each_program(lambda each: each.name, config, jax.devices()[:1]) == ["learn"]


def test_the_program_is_the_one_that_training_starts() -> None:
    config, device = parse_config(tiny()), jax.devices()[0]
    real, shapes = build(config), build(config, absent=[device])
    lowered = shapes.stepper.trace(*shapes.stepper.shapes(shapes.state, device)).lower()  # type: ignore[attr-defined]
    started = real.stepper.trace(jax.device_put(real.state, device), real.stepper._key).lower()  # type: ignore[attr-defined]
    assert lowered.as_text() == started.as_text()


@cases(
    "message gives_up",
    ("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.1", False),
    ("INTERNAL: out of memory", True),
)
def test_products_that_have_no_tiles_without_a_card_are_library_calls(message: str, gives_up: bool) -> None:
    class Untiled:
        def compile(self, options: dict[str, Any]) -> str:
            if options.get("xla_gpu_enable_triton_gemm", True):
                raise jax.errors.JaxRuntimeError(message)
            return "compiled"

    lowered: Any = Untiled()
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory") if gives_up else nullcontext():
        assert Program("train", lowered, lowered, 0).compile() == ("compiled", True)


def test_a_state_for_absent_devices_is_not_made() -> None:
    parts = build(parse_config(tiny(num_envs=2**28 - 1)), absent=jax.devices()[:1])
    assert {type(leaf) for leaf in jax.tree.leaves(parts.state)} == {jax.ShapeDtypeStruct}
    assert parts.state.episodes.current_return.shape == (2**28 - 1,)


def test_several_devices_each_have_the_config_s_environments() -> None:
    parts = build(parse_config(tiny()), absent=jax.devices()[:2])
    assert parts.num_devices == 2 and parts.state.episodes.current_return.shape == (2 * NUM_ENVS,)


@needs_compiler
def test_a_config_is_compiled_for_two_cards_that_are_not_here(tmp_path: Path) -> None:
    """In a separate process: the options that the tests give XLA may change what it compiles."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "ejax.preflight", "--config", "tiny.yaml", "--gpus", "2", "--json", "found.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "an update" in result.stdout and "Not known:" in result.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["schema_version"] == 3 and found["env_steps_per_update"] == 2 * STEPS
    assert found["programs"]["train"]["product_flops"]


def test_an_estimate_leaves_out_what_does_not_grow() -> None:
    fit = estimate(memory(peak=2_000 + 64_000, fixed=1_000), 64, card_memory=10_000_000)
    assert fit["num_envs"] == (USABLE * 10_000_000 - 2_000) // 1_000
    # 300,000 - 130,000 for 100 environments, and 750,000 are usable
    fit = estimate(memory(peak=300_000, fixed=1_000, replay=128_000), 100, 1_000_000)
    assert fit["num_envs"] == (750_000 - 130_000) // 1_700


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_card_s_description_says_what_its_bounds_say(name: str, tmp_path: Path) -> None:
    (path := tmp_path / "card.txtpb").write_text(CARDS[name].text)
    read = find_card(str(path))
    assert (read.name, read.memory) == (CARDS[name].name, CARDS[name].memory)
    assert (read.bandwidth, read.fp32) == pytest.approx((CARDS[name].bandwidth, CARDS[name].fp32))


@pytest.mark.parametrize("installed", ["mjx", "warp"])
def test_physics_auto_is_settled_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    lacks = {"warp": None if installed == "warp" else "pip install -e '.[warp]' in ejax's folder"}
    monkeypatch.setattr("ejax.envs.mujoco.choice.how_to_install", lacks.get)
    monkeypatch.setattr("ejax.training.environments.how_to_install", lacks.get)
    config, (note,) = on_accelerator(parse_config(tiny(env="CartPoleRL")))
    assert config.env.cfg["physics"] == installed
    assert note.startswith(f"physics: {installed}, since JAX computes on CUDA")


def test_an_environment_without_a_choice_of_physics_stays_as_it_is() -> None:
    config = parse_config(tiny())
    assert on_accelerator(config) == (config, ())


@cases(
    "refused text",
    (lambda: on_accelerator(parse_config(tiny(env="CartPoleRL", env_cfg={"physics": "mujoco"}))), "got 'mujoco'"),
    (lambda: programs_of(parse_config(tiny(env="gymnasium:Pendulum-v1"))), "lives outside JAX"),
    (lambda: programs_of(load_config(ROOT / "configs/push_cube/bc.yaml")), "bc learns from demonstrations"),
    (lambda: find_card("h300"), "got 'h300'; allowed: h100, h200, a100, l40s, rtx4090, b200, or a file"),
    ids=["the C engine", "outside JAX", "cloning", "a card"],
)
def test_what_cannot_be_compiled_is_refused(refused: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        refused()


def programs_of(config: Any) -> Any:
    return for_each_program(str, config, jax.devices()[:1])


def test_a_description_without_what_the_bounds_need_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "card.txtpb").write_text("gpu_device_info { core_count: 1 }")
    refused(find_card, str(path), match="has no fpus_per_core")


CUDA12, CUDA13 = (("jax-cuda12-plugin", "jax-cuda12-pjrt"), ("jax-cuda13-plugin", "jax-cuda13-pjrt"))


@cases(
    "installed text",
    ({}, r"not installed; pip install -e '.\[preflight\]'"),
    (dict.fromkeys(CUDA12, "0.1.0"), "jax-cuda12-plugin 0.1.0, .* do not fit jax"),
    ({"jax-cuda12-plugin": jax.__version__}, "not installed"),
    (dict.fromkeys(CUDA13, jax.__version__), None),
)
def test_a_compiler_that_is_missing_or_does_not_fit_ends_in_a_message(
    installed: dict[str, str],
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nothing_trusted: None,
) -> None:
    found = [SimpleNamespace(name=name, version=number) for name, number in installed.items()]
    monkeypatch.setattr(run, "distributions", lambda: found)
    if text is None:
        assert compiler_problem() is None
        return
    assert main(["--config", str(ROOT / "configs/point_mass/ppo.yaml")]) == 2
    error = capsys.readouterr().err
    assert re.search(text, error) and error.count("ejax preflight:") == 1


@pytest.mark.parametrize("demonstrated", [0, 600])
def test_a_replay_buffer_fills_what_the_environments_leave(demonstrated: int) -> None:
    sac: dict[str, Any] = {"replay": {"capacity": 1000 - demonstrated}}
    if demonstrated:
        sac["demonstrations"] = {"num_transitions": demonstrated, "task": "PushCubeExpert"}
    facts = replay_facts(parse_config(tiny_sac(sac=sac)), memory(300_000, 1_000, replay=128_000), 1, 1_000_000)
    assert facts is not None
    assert (facts["row_bytes"], facts["bytes"]) == (128, 128_000)
    assert facts["largest_capacity"] == 578_000 // 128 - demonstrated
