"""Preflight: the programs of training and evaluation, for devices that are not here; what it finds, and refuses."""

import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from rich.console import Console
from tiny import EVALUATED, NUM_ENVS, NUM_STEPS, PPO, STEPS, tiny, tiny_sac

from ejax.config import ConfigError, Problem, load_config, parse_config
from ejax.preflight import plugin
from ejax.preflight.__main__ import main
from ejax.preflight.bounds import HOST_TRIP_S, LAUNCH_S, bounds
from ejax.preflight.cost import Collective, Cost, instruction_cost
from ejax.preflight.hlo import parse
from ejax.preflight.plugin import compiler_problem
from ejax.preflight.programs import Compiled, Memory, _compile_products, compile_programs, on_accelerator
from ejax.preflight.report import Settings, describe, show
from ejax.preflight.run import USABLE, estimate, replay_facts, search
from ejax.preflight.targets import CARDS, find_card
from ejax.training.build import build

H100 = CARDS["h100"]
SECONDS = {"wall": 1.0, "cpu": 2.0}
ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(compiler_problem() is not None, reason=compiler_problem() or "")


@pytest.fixture(scope="module")
def programs() -> list[Compiled]:
    """Compile a tiny run for the CPU: everything but the card is as for a GPU."""
    return compile_programs(parse_config(tiny(**EVALUATED)), jax.devices()[:1])


def settings(**changes: Any) -> Settings:
    settings = Settings("tiny.yaml", (), "h100", gpus=1, hosts=1, num_envs=NUM_ENVS, num_steps=NUM_STEPS)
    return replace(settings, **changes)


def memory(peak: int, fixed: int = 0) -> Memory:
    return Memory(arguments=0, outputs=0, temporaries=0, peak=peak, fixed=fixed)


@pytest.fixture(scope="module")
def found(programs: list[Compiled]) -> dict[str, Any]:
    return describe(settings(), H100, programs, asdict(estimate(programs[0].memory, NUM_ENVS, H100.memory)), SECONDS)


def test_training_and_evaluation_are_compiled(programs: list[Compiled]) -> None:
    assert [each.name for each in programs] == ["train", "evaluate"]


@pytest.mark.slow
def test_without_evaluation_there_is_no_program_for_it() -> None:
    config = parse_config(tiny(collector={"mode": "host"}))
    assert [each.name for each in compile_programs(config, jax.devices()[:1])] == ["learn"]


def test_the_program_is_the_one_that_training_starts() -> None:
    config, device = parse_config(tiny()), jax.devices()[0]
    real, shapes = build(config), build(config, absent=[device])
    lowered = shapes.stepper.lower(*shapes.stepper.shapes(shapes.state, device))  # type: ignore[attr-defined]
    started = real.stepper.lower(jax.device_put(real.state, device), real.stepper._key)  # type: ignore[attr-defined]
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
    assert _compile_products(lowered, Path("dump")) == ("compiled", True)


def test_what_else_xla_gives_up_is_an_error() -> None:
    lowered: Any = Untiled("INTERNAL: out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        _compile_products(lowered, Path("dump"))


def test_a_state_for_absent_devices_is_not_made() -> None:
    parts = build(parse_config(tiny(num_envs=2**28 - 1)), absent=jax.devices()[:1])
    assert {type(leaf) for leaf in jax.tree.leaves(parts.state)} == {jax.ShapeDtypeStruct}
    assert parts.state.episodes.current_return.shape == (2**28 - 1,)


def test_several_devices_each_have_the_config_s_environments() -> None:
    parts = build(parse_config(tiny()), absent=jax.devices()[:2])
    assert parts.num_devices == 2 and parts.state.episodes.current_return.shape == (2 * NUM_ENVS,)


def test_what_the_loops_cost_is_under_their_names(found: dict[str, Any]) -> None:
    units = found["programs"]["train"]["units"]
    assert {"update", "env step", "minibatch"} <= set(units)
    assert units["env step"]["trips"] == NUM_STEPS and units["update"]["trips"] is None
    assert units["update"]["kernels"] > NUM_STEPS * units["env step"]["kernels"] > 0
    assert units["env step"]["host_trips"] >= 1  # whether an episode ended
    # one loop: a loop over epochs around it would split a CUDA graph
    assert units["minibatch"]["trips"] == PPO["n_epochs"] * STEPS // PPO["batch_size"]


def test_a_rollout_keeps_what_it_is_made_of(found: dict[str, Any]) -> None:
    obs, final_obs, action, mean = 14, 14, 2, 2  # floats of a PointMass step; the rest is a few scalars
    kept = found["programs"]["train"]["stored_bytes_per_env_step"]
    assert 4 * (obs + final_obs + action + mean) < kept < 4 * (obs + final_obs + action + mean) + 64


def test_everything_is_json_with_a_schema_version(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found))["schema_version"] == 2


def test_the_tables_show_each_program_and_what_is_not_known(found: dict[str, Any]) -> None:
    show(found, Console(width=160, file=(lines := io.StringIO())))
    text = lines.getvalue()
    for words in ("train: memory of each GPU", "evaluate: memory", "Largest num_envs", "Assumed:", "Not known:"):
        assert words in text


@pytest.mark.slow
def test_the_host_s_updates_are_a_program_too() -> None:
    programs = compile_programs(parse_config(tiny(collector={"mode": "host"})), jax.devices()[:1])
    units = describe(settings(), H100, programs, None, SECONDS)["programs"]["learn"]["units"]
    assert units["update"]["kernels"] > units["minibatch"]["kernels"] > 0


@pytest.mark.parametrize(
    ("cost", "limiting", "seconds"),
    [
        (Cost(num_bytes=H100.bandwidth), "memory", 1.0),
        (Cost(element_ops=2.0 * H100.fp32), "arithmetic", 2.0),
        (Cost(kernels=1000.0, host_trips=10.0), "launches", 1000 * LAUNCH_S + 10 * HOST_TRIP_S),
    ],
)
def test_the_bound_is_that_of_the_scarcest_resource(cost: Cost, limiting: str, seconds: float) -> None:
    limits = bounds(cost, H100)
    assert limits.limiting == limiting and limits.seconds == pytest.approx(seconds)


def test_products_are_bound_by_the_rate_of_their_precision() -> None:
    tf32, exact = Cost(), Cost()
    tf32.dot_flops["f32"] = exact.dot_flops["f32 exact"] = 10**12
    assert bounds(tf32, H100).arithmetic == pytest.approx(1 / 494.7)
    assert bounds(exact, H100).arithmetic == pytest.approx(1e12 / H100.fp32)


def test_a_ring_of_eight_sends_seven_quarters_of_what_it_reduces() -> None:
    cost = Cost()
    cost.collectives[Collective("all-reduce", 8000, 8, "update")] = 2
    assert H100.link is not None
    assert bounds(cost, H100).links == pytest.approx(2 * 8000 * 7 / 4 / H100.link)


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
        compile_programs(config, jax.devices()[:1])


def test_cloning_is_refused() -> None:
    with pytest.raises(ConfigError, match="bc learns from demonstrations"):
        compile_programs(load_config(ROOT / "configs/push_cube/bc.yaml"), jax.devices()[:1])


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
    monkeypatch.setattr(plugin, "_version", installed.get)
    assert main(["--config", str(ROOT / "configs/point_mass/ppo.yaml")]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_a_compiler_of_jax_s_release_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    both = dict.fromkeys(("jax-cuda13-plugin", "jax-cuda13-pjrt"), jax.__version__)
    monkeypatch.setattr(plugin, "_version", both.get)
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


def test_the_command_needs_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "give --config FILE" in capsys.readouterr().err


KEEPING_THE_DUMP = """
import contextlib, sys
from ejax.preflight import __main__, programs
programs.TemporaryDirectory = lambda prefix: contextlib.nullcontext("dump")
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def for_two_cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with preflight's findings on a tiny run on two cards, and XLA's own account of its compilation.

    In a process of its own: the options that the tests give XLA may change what it compiles.
    """
    folder = tmp_path_factory.mktemp("two_cards")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny()))
    (folder / "dump").mkdir()
    command = ["-c", KEEPING_THE_DUMP, "--config", "tiny.yaml", "--gpus", "2", "--json", "found.json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )
    assert result.returncode == 0, result.stderr
    return folder


@needs_compiler
def test_a_config_is_compiled_for_two_cards_that_are_not_here(for_two_cards: Path) -> None:
    training = json.loads((for_two_cards / "found.json").read_text())["programs"]["train"]
    assert training["units"]["minibatch"]["collectives"] >= 1
    assert {each["devices"] for each in training["collectives"]} == {2}


@needs_compiler
def test_the_host_launches_a_whole_training_at_once(for_two_cards: Path) -> None:
    training = json.loads((for_two_cards / "found.json").read_text())["programs"]["train"]
    assert training["launches"] == 1
    assert {each["launches"] for each in training["units"].values()} == {0}


@needs_compiler
def test_as_many_kernels_are_counted_as_xla_says_that_it_launches(for_two_cards: Path) -> None:
    (hlo,) = (for_two_cards / "dump").glob("*jit_repeated*after_optimizations.txt")
    (launches,) = (for_two_cards / "dump").glob("*jit_repeated.thunk_sequence.txt")
    module = parse(hlo.read_text())
    instructions = [each for computation in module.computations.values() for each in computation.instructions]
    inside = {name for each in instructions for name in each.called("calls", "to_apply")}
    counted = sum(
        instruction_cost(module, computation, each, "").kernels
        for computation in module.computations.values()
        for each in computation.instructions
        if computation.name not in inside
    )
    kinds = Counter(re.findall(r"^ *\d+: k(\w+)", launches.read_text(), re.MULTILINE))
    assert counted == sum(kinds[kind] for kind in ("CustomKernel", "Copy", "AllReduce", "AllGather", "PartitionId"))


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
