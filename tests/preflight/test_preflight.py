"""Preflight: the programs of training and evaluation, for devices that are not here; what it finds, and refuses."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from tiny import EVALUATED, NUM_ENVS, STEPS, tiny, tiny_sac

from ejax.config import ConfigError, Problem, load_config, parse_config
from ejax.preflight import run
from ejax.preflight.__main__ import main
from ejax.preflight.programs import Memory, Program, for_each_program, on_accelerator
from ejax.preflight.run import USABLE, Compiled, compiler_problem, describe, estimate, measure, replay_facts, search
from ejax.preflight.targets import CARDS, find_card
from ejax.training.build import build

H100 = CARDS["h100"]
ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(compiler_problem() is not None, reason=compiler_problem() or "")


@pytest.fixture(scope="module")
def programs() -> list[Compiled]:
    """Compile a tiny run for the CPU: everything but the card is as for a GPU."""
    return for_each_program(partial(measure, 1), parse_config(tiny(**EVALUATED)), jax.devices()[:1])


def memory(peak: int, fixed: int = 0) -> Memory:
    return Memory(arguments=0, outputs=0, temporaries=0, peak=peak, fixed=fixed)


def test_training_and_evaluation_are_compiled(programs: list[Compiled]) -> None:
    assert [each.name for each in programs] == ["train", "evaluate"]


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


class Untiled:
    """A lowered program that XLA gives up with ``message``, unless products are library calls."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self, options: dict[str, Any]) -> str:
        if options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(self.message)
        return "compiled"


def test_products_that_have_no_tiles_without_a_card_are_library_calls() -> None:
    lowered: Any = Untiled("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.1")
    assert Program("train", lowered, lowered, 0).compile() == ("compiled", True)


def test_what_else_xla_gives_up_is_an_error() -> None:
    lowered: Any = Untiled("INTERNAL: out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        Program("train", lowered, lowered, 0).compile()


def test_a_state_for_absent_devices_is_not_made() -> None:
    parts = build(parse_config(tiny(num_envs=2**28 - 1)), absent=jax.devices()[:1])
    assert {type(leaf) for leaf in jax.tree.leaves(parts.state)} == {jax.ShapeDtypeStruct}
    assert parts.state.episodes.current_return.shape == (2**28 - 1,)


def test_several_devices_each_have_the_config_s_environments() -> None:
    parts = build(parse_config(tiny()), absent=jax.devices()[:2])
    assert parts.num_devices == 2 and parts.state.episodes.current_return.shape == (2 * NUM_ENVS,)


def test_a_program_s_work_is_its_products_at_their_rate(programs: list[Compiled]) -> None:
    train, evaluate = programs
    assert set(train.work.products) == {"f32"}
    assert train.work.flops > evaluate.work.flops > 0
    found = describe(train, H100)
    assert found["bounds_s"]["memory"] == pytest.approx(train.work.num_bytes / H100.bandwidth)
    assert found["limited_by"] in found["bounds_s"]
    assert json.loads(json.dumps(found)) == found


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
    assert fit.num_envs == (USABLE * 10_000_000 - 2_000) // 1_000


def test_a_search_finds_the_largest_multiple_that_fits() -> None:
    sizes = []

    def memory_at(num_envs: int) -> Memory:
        sizes.append(num_envs)
        return memory(peak=50_000 + 1_000 * num_envs)

    fit = search(memory_at, memory_at(64), 64, card_memory=10_000_000)
    assert fit.num_envs % 64 == 0 and fit.num_envs in sizes
    assert 0.95 * 7450 < fit.num_envs <= 7450


def test_memory_that_grows_faster_than_a_line_is_found_to_be_too_much() -> None:
    fit = search(lambda n: memory(peak=n * n), memory(peak=64 * 64), 64, card_memory=10**8)
    assert 64 <= fit.num_envs <= (USABLE * 10**8) ** 0.5


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_card_s_description_says_what_its_bounds_say(name: str, tmp_path: Path) -> None:
    (path := tmp_path / "card.txtpb").write_text(CARDS[name].text)
    read = find_card(str(path))
    assert (read.name, read.memory) == (CARDS[name].name, CARDS[name].memory)
    assert (read.bandwidth, read.fp32) == pytest.approx((CARDS[name].bandwidth, CARDS[name].fp32))


def test_an_unknown_card_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="got 'h300'; allowed: h100, h200, a100, l40s, rtx4090, b200, or a file"):
        find_card("h300")


def test_a_description_without_what_the_bounds_need_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "card.txtpb").write_text("gpu_device_info { core_count: 1 }")
    with pytest.raises(ConfigError, match="has no fpus_per_core"):
        find_card(str(path))


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


def test_the_c_engine_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"env.cfg.physics: got 'mujoco'.*give env.cfg.physics=mjx"):
        on_accelerator(parse_config(tiny(env="CartPoleRL", env_cfg={"physics": "mujoco"})))


def test_an_environment_outside_jax_is_refused() -> None:
    config = parse_config(tiny(env="gymnasium:Pendulum-v1"))
    with pytest.raises(ConfigError, match="gymnasium:Pendulum-v1 lives outside JAX"):
        for_each_program(str, config, jax.devices()[:1])


def test_cloning_is_refused() -> None:
    with pytest.raises(ConfigError, match="bc learns from demonstrations"):
        for_each_program(str, load_config(ROOT / "configs/push_cube/bc.yaml"), jax.devices()[:1])


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        ({}, "compiling for a GPU needs XLA's GPU compiler, which is not installed; pip install -e '.\\[preflight\\]'"),
        ({"jax-cuda12-plugin": "0.1.0", "jax-cuda12-pjrt": "0.1.0"}, "jax-cuda12-plugin 0.1.0, .* do not fit jax"),
        ({"jax-cuda12-plugin": jax.__version__}, "which is not installed"),
    ],
)
def test_a_compiler_that_is_missing_or_does_not_fit_ends_in_a_message(
    installed: dict[str, str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    nothing_trusted: None,
) -> None:
    monkeypatch.setattr(run, "_version", installed.get)
    assert main(["--config", str(ROOT / "configs/point_mass/ppo.yaml")]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_a_compiler_of_jax_s_release_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    both = dict.fromkeys(("jax-cuda13-plugin", "jax-cuda13-pjrt"), jax.__version__)
    monkeypatch.setattr(run, "_version", both.get)
    assert compiler_problem() is None


def test_the_command_puts_its_name_before_an_error_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(args: Any) -> int:
        raise ConfigError([Problem("--gpus", "got 0")], "ejax.preflight")

    for name in ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"):  # which main sets
        monkeypatch.setenv(name, "cpu" if name == "JAX_PLATFORMS" else "2")
    monkeypatch.setattr("ejax.preflight.__main__._run", refuse)
    assert main(["--config", "any.yaml"]) == 2
    assert capsys.readouterr().err == "ejax.preflight: 1 problem\n  --gpus: got 0\n"


def test_a_replay_buffer_does_not_grow_with_the_environments_and_fills_what_they_leave() -> None:
    sac = {"gradient_steps": 8, "batch_size": 32, "replay": {"capacity": 1000}}
    config = parse_config(tiny_sac(sac=sac))
    memory = Memory(arguments=0, outputs=0, temporaries=0, peak=300_000, fixed=1_000, replay=128_000)
    # 300,000 - 130,000 for 100 environments, and 750,000 are usable
    assert estimate(memory, 100, 1_000_000).num_envs == (750_000 - 130_000) // 1_700
    facts = replay_facts(config, memory, 1, 1_000_000)
    assert facts is not None
    assert (facts["row_bytes"], facts["bytes"], facts["largest_capacity"]) == (128, 128_000, 578_000 // 128)
    assert (facts["gathers_per_update"], facts["rows_per_gather"]) == (8, 32)


def test_rows_on_the_host_are_counted_and_take_none_of_the_cards_memory() -> None:
    config = parse_config(tiny_sac(sac={"replay": {"capacity": 1000, "storage": "host"}}))
    memory = Memory(arguments=0, outputs=0, temporaries=0, peak=30_000, fixed=1_000, replay_on_host=128_000)
    facts = replay_facts(config, memory, 1, 100_000)
    assert facts is not None
    assert (facts["row_bytes"], facts["bytes"], facts["storage"]) == (128, 128_000, "host")
    assert facts["largest_capacity"] is None


def test_demonstrations_beside_a_replay_buffer_take_their_part_of_the_memory() -> None:
    beside = {"num_transitions": 600, "task": "PushCubeExpert"}
    config = parse_config(tiny_sac(sac={"replay": {"capacity": 400}, "demonstrations": beside}))
    memory = Memory(arguments=0, outputs=0, temporaries=0, peak=300_000, fixed=1_000, replay=128_000)
    facts = replay_facts(config, memory, 1, 1_000_000)
    assert facts is not None
    assert (facts["row_bytes"], facts["largest_capacity"]) == (128, 578_000 // 128 - 600)
