"""A population: its config, members that do not touch each other, and numbers that are those of runs by themselves."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from helpers.tiny import EVALUATED, GRPO, STEPS, tiny
from kills import Killed, kill_at

from ejax.algorithms.ppo import PPOConfig
from ejax.algorithms.step import RunState, Step, repeat_step
from ejax.config import ConfigError, RunConfig, parse_config
from ejax.numerics.episodes import init_episode_stats
from ejax.optim import OptimizerConfig, get_learning_rate, make_optimizer
from ejax.play.saved_policy import evaluate_run
from ejax.population.lanes import best_member, summaries
from ejax.population.loop import PopulationResult, train_population
from ejax.population.members import build_population
from ejax.population.step import (
    FITNESS,
    PARENT,
    Exploit,
    Placement,
    PopulationState,
    Values,
    exploited,
    make_population_step,
    own_keys,
    with_values,
)
from ejax.report.__main__ import main as report
from ejax.report.runs import Run, runs_in
from ejax.run import train
from ejax.runtime.sharding import members_mesh
from ejax.schema.writing import LinkError
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import open_policy_run
from ejax.store.run_lock import run_lock
from ejax.train import main
from ejax.training.build import build
from ejax.training.saver import Progress
from ejax.training.sink import RunSink
from ejax.types import Key, Metrics, PyTree, TrainState

RATE = "algorithm.cfg.optimizer.learning_rate"
M = 4


def population(given: dict[str, Any], **changes: Any) -> RunConfig:
    return parse_config({**tiny(**changes), "population": given})


def test_members_are_all_seeds_of_each_combination() -> None:
    config = population({"seeds": 2, RATE: [1e-3, 2e-3], "algorithm.cfg.gamma": [0.9]})
    assert [(member.seed, member.values[RATE]) for member in config.members] == [
        (1, 1e-3),
        (2, 1e-3),
        (1, 2e-3),
        (2, 2e-3),
    ]
    assert all(member.values["algorithm.cfg.gamma"] == 0.9 for member in config.members)


def test_a_member_is_a_config_of_its_own() -> None:
    config = population({"seeds": [7, 9], RATE: [1e-3, 2e-3]})
    own = config.of_member(config.members[3])
    changed = parse_config(tiny(ppo={"optimizer": {"learning_rate": 2e-3}}, seed=9, eval_seed=config.trainer.eval_seed))
    assert own == changed


def test_overrides_dotted_keys_and_the_canonical_form_say_the_same() -> None:
    written = population({"seeds": 3, RATE: [1e-3, 2e-3]})
    overridden = parse_config(tiny(), ["population.seeds=3", f"population.{RATE}=[1e-3, 2e-3]"])
    flat = population({"seeds": 3, "algorithm.cfg.learning_rate": [1e-3, 2e-3]})
    assert written == overridden == flat == parse_config(written.to_dict())


@cases(
    "given says",
    ({"seeds": [1, 1]}, "different seeds"),
    ({"seedz": 2}, "Did you mean 'seeds'"),
    ({RATE: []}, "a list of different values"),
    ({RATE: 1e-3}, "got 0.001"),
    ({RATE: [-1.0]}, "learning_rate=-1.0 is .* greater"),
    ({"algorithm.cfg.n_epochs": [1, 2]}, "decides shapes and loops"),
    ({"algorithm.cfg.optimizer.name": ["adam", "sgd"]}, "got 'adam'"),
    ({"algorithm.cfg.gama": [0.9]}, "unknown key"),
    ({"trainer.num_envs": [4, 8]}, "got trainer.num_envs; .* examples/sweep.py trains"),
    ({"data.buffer_size": [16, 32]}, "got data.engine.buffer_size; .* examples/sweep.py trains"),
    ({"trainer.seed": [4, 8]}, "use population.seeds"),
    ({"exploit": {"every": 1}}, "needs at least two members"),
    ({"separate_runs": True, "seeds": 2}, "was removed: examples/sweep.py"),
    ({"apart": True, "seeds": 2}, "was removed: examples/sweep.py"),
    ({"seeds": 2, "exploit": {"every": 1, "fraction": 0.6}}, "less than or equal to 0.5"),
    ({"algorithm.cfg.optimizer.kwargs.eps": [1e-8, 1e-6], "exploit": {"every": 1}}, "range is not known"),
)
def test_what_cannot_be_a_population_is_refused(given: dict[str, Any], says: str) -> None:
    refused(population, given, match=says.replace("(", r"\("))


def test_a_population_of_an_earlier_version_is_read() -> None:
    raw = population({"seeds": 2}).to_dict()
    assert parse_config({**raw, "population": {**raw["population"], "separate_runs": False}}) == parse_config(raw)


def test_train_of_one_run_refuses_a_population() -> None:
    refused(lambda: train(population({"seeds": 2})), match="train_population")


def test_an_environment_outside_the_program_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an environment inside the program, got gymnasium:Pendulum-v1"):
        build_population(population({"seeds": 2}, env="gymnasium:Pendulum-v1"))


def toy_step(values: Values) -> Step:
    """w ← w·(1 − rate) + noise; the return of an episode is −|w|."""

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        w = state.train.params["params"]["w"]
        w = w * (1.0 - values["rate"]) + 0.01 * jax.random.normal(key)
        episodes = replace(
            state.episodes, returns=jnp.full(100, -jnp.abs(w)), num_episodes=state.episodes.num_episodes + 1
        )
        train = replace(state.train, params={"params": {"w": w}})
        metrics = {"train/loss": w, FITNESS: -jnp.abs(w)}
        return replace(state, update=state.update + 1, train=train, episodes=episodes), metrics

    return step


def toy_optimizer(values: Values) -> Any:
    return make_optimizer(OptimizerConfig.model_construct(learning_rate=values["rate"]))


def toy_state(rates: list[float]) -> PopulationState:
    def member(rate: jax.Array) -> RunState:
        params = {"params": {"w": jnp.ones(())}}
        opt_state = toy_optimizer({"rate": rate}).init(params["params"])
        train = TrainState(params=params, opt_state=opt_state, step=jnp.zeros((), jnp.int32))
        return RunState(update=jnp.zeros((), jnp.int32), train=train, episodes=init_episode_stats(1))

    rate = jnp.asarray(rates)
    return PopulationState(
        update=jnp.zeros((), jnp.int32),
        members=jax.vmap(member)(rate),
        values={"rate": rate},
        alive=jnp.ones(len(rates), bool),
    )


ONE_BY_ONE = Placement(together=False)
FOUR = members_mesh(jax.devices())
RATES = [0.1, 0.2, 0.3, 0.4]
EXPLOIT = Exploit(every=3, count=1, perturb=(0.5, 2.0), bounds={"rate": (0.0, 0.4)}, make_optimizer=toy_optimizer)


def toy_run(
    rates: list[float], num_updates: int, placement: Placement = ONE_BY_ONE, exploit: Exploit | None = None
) -> tuple[PopulationState, Metrics]:
    step = make_population_step(toy_step, placement=placement, stops_at_nonfinite=True, exploit=exploit)
    keys = jnp.stack([jax.random.key(seed) for seed in range(len(rates))])
    return repeat_step(step, num_updates, fold=own_keys)(toy_state(rates), keys, jnp.int32(num_updates))


def weights(state: PopulationState) -> jax.Array:
    return state.members.train.params["params"]["w"]


def equal(a: PyTree, b: PyTree) -> bool:
    same = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True), a, b)
    return all(jax.tree.leaves(same))


def test_a_member_that_breaks_is_held_and_the_others_do_not_notice() -> None:
    healthy, _ = toy_run([0.1, 0.2, 0.3, 0.4], 5)
    broken, metrics = toy_run([0.1, 1e38, 0.3, 0.4], 5)
    others = np.array([0, 2, 3])
    assert broken.alive.tolist() == [True, False, True, True]
    assert equal(weights(broken)[others], weights(healthy)[others])
    assert np.isfinite(weights(broken)[1])
    # 1e38 leaves float32 in the second update; from then on the member is not trained
    assert metrics["population/alive"][:, 1].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert int(broken.members.update[1]) == 1
    assert np.isnan(metrics["train/loss"][2:, 1]).all()


@pytest.mark.slow
def test_on_several_devices_members_are_the_same() -> None:
    alone, on_four = (toy_run(RATES, 4, lanes, EXPLOIT) for lanes in (ONE_BY_ONE, replace(ONE_BY_ONE, mesh=FOUR)))
    assert equal(on_four, alone)


def test_side_by_side_members_are_the_same_within_rounding() -> None:
    alone, _ = toy_run(RATES, 4, exploit=EXPLOIT)
    for lanes in (Placement(together=True), Placement(together=True, mesh=FOUR)):
        together, _ = toy_run(RATES, 4, lanes, EXPLOIT)
        np.testing.assert_allclose(weights(together), weights(alone), rtol=1e-6)
        assert equal(together.values, alone.values)


def test_exploit_copies_the_best_to_the_worst_at_its_updates_only() -> None:
    _, metrics = toy_run([0.01, 0.2, 0.3, 0.4], 6, exploit=EXPLOIT)
    own = list(range(M))
    parents = np.asarray(metrics[PARENT]).astype(int).tolist()
    assert [parents[i] for i in (0, 1, 3, 4)] == [own] * 4
    assert parents[2] != own and parents[5] != own
    best = int(np.argmax(metrics[FITNESS][2]))
    assert parents[2] == [best, 1, 2, 3]  # the slowest is the worst, and goes on from the best


@pytest.mark.slow
def test_what_is_copied_is_perturbed_within_bounds_and_the_rate_in_the_optimizer_too() -> None:
    state = toy_state([0.1, 0.2, 0.3, 0.3])
    fitness = jnp.asarray([0.0, 1.0, 2.0, 3.0])
    after, parent = exploited(state, fitness, jax.random.key(0), replace(EXPLOIT, count=2))
    assert parent[2:].tolist() == [2, 3] and set(parent[:2].tolist()) <= {2, 3}
    # 0.3 · 0.5, or 0.3 · 2 held within the bound
    assert all(any(np.isclose(x, y) for y in (0.15, 0.4)) for x in after.values["rate"][:2])
    assert after.values["rate"][2:].tolist() == state.values["rate"][2:].tolist()
    assert get_learning_rate(after.members.train.opt_state).tolist() == after.values["rate"].tolist()


def test_a_scheduled_rate_moves_by_the_factor_of_its_value() -> None:
    state = toy_state([0.1, 0.2])
    scheduled = jax.tree.map(lambda x: x, state.members.train.opt_state)
    scheduled = (scheduled[0], scheduled[1]._replace(learning_rate=state.values["rate"] / 10.0))
    state = replace(state, members=replace(state.members, train=replace(state.members.train, opt_state=scheduled)))
    after, _ = exploited(state, jnp.asarray([0.0, 1.0]), jax.random.key(0), EXPLOIT)
    np.testing.assert_allclose(get_learning_rate(after.members.train.opt_state) * 10.0, after.values["rate"], rtol=1e-6)


def test_a_broken_member_is_the_worst_and_lives_again_by_a_copy() -> None:
    state = replace(toy_state([0.1, 0.2, 0.3, 0.4]), alive=jnp.array([True, True, False, True]), update=jnp.int32(9))
    after, parent = exploited(state, jnp.asarray([1.0, 0.0, 5.0, 0.5]), jax.random.key(0), EXPLOIT)
    assert parent.tolist() == [0, 1, 0, 3] and after.alive.all()
    assert after.members.update.tolist() == [0, 0, 9, 0]


def test_nobody_is_copied_while_no_return_is_known() -> None:
    state = toy_state([0.1, 0.2, 0.3, 0.4])
    after, parent = exploited(state, jnp.full(M, jnp.nan), jax.random.key(0), EXPLOIT)
    assert parent.tolist() == [0, 1, 2, 3] and equal(after, state)


def test_a_member_whose_first_episode_goes_on_is_not_replaced() -> None:
    """It may be the one that survives longest; what was not finite is replaced."""
    state = toy_state([0.1, 0.2, 0.3, 0.4])
    for fitness, wanted in (([jnp.nan, 1.0, 2.0, 0.0], [0, 1, 2, 2]), ([-jnp.inf, 1.0, 2.0, 0.0], [2, 1, 2, 3])):
        _, parent = exploited(state, jnp.asarray(fitness), jax.random.key(0), EXPLOIT)
        assert parent.tolist() == wanted


def test_summaries_are_of_the_finite_values() -> None:
    values = np.array([3.0, np.nan, 1.0, 100.0, 2.0])
    rows = summaries({"a": values, "b": np.full(5, np.nan)}, best={"a": "max"})
    # of 1, 2, 3, 100 the middle half is 2, 3
    assert rows == {"a/median": 2.5, "a/iqm": 2.5, "a/best": 100.0}


def test_the_best_member_has_the_best_evaluation_and_of_equal_ones_the_higher_reward() -> None:
    trainer = population({"seeds": 3}).trainer
    progress = [Progress(1.0, 0, reward) for reward in (0.2, 0.4, 0.3)]
    assert best_member(trainer, progress, [0.0] * 3) == 1
    assert best_member(trainer, [Progress()] * 3, [float("nan"), 1.0, 2.0]) == 2
    assert best_member(trainer, [Progress()] * 3, [float("nan")] * 3) is None


def config_of(out: Path, iterations: int = 4) -> RunConfig:
    given = {"seeds": 2, RATE: [1e-3, 3e-3]}
    return population(given, output_dir=out, iterations=iterations, save_frequency_updates=2, **EVALUATED)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PopulationResult:
    out = tmp_path_factory.mktemp("population")
    return train_population(config_of(out), run_dir=out / "whole")


def lines(run: Path) -> list[dict[str, Any]]:
    text = (run / "logs" / "metrics.jsonl").read_text()
    return [
        {tag: x for tag, x in json.loads(line).items() if not tag.startswith(("time", "memory/", "charts/SPS"))}
        for line in text.splitlines()
    ]


TOGETHER_AND_ALONE = """
import json, sys
from pathlib import Path
from ejax.config import parse_config
from ejax.population.loop import train_population
from ejax.run import train
whole, alone = map(Path, sys.argv[1:])
train_population(parse_config(json.loads(sys.stdin.read())), run_dir=whole)
train(parse_config(json.loads((whole / "members" / "3" / "configs" / "resolved.json").read_text())), run_dir=alone)
"""


@pytest.mark.slow
def test_a_member_has_the_numbers_of_a_run_by_itself(tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    # with the compiler's usual flags: those of the tests round differently inside the loop over members, on some CPUs
    env = os.environ | {"XLA_FLAGS": ""}
    given = json.dumps(config_of(tmp_path).to_dict())
    subprocess.run(
        [sys.executable, "-c", TOGETHER_AND_ALONE, whole, alone], input=given, env=env, text=True, check=True
    )
    folder = whole / "members" / "3"
    own = parse_config(json.loads((folder / "configs" / "resolved.json").read_text()))
    assert (own.trainer.seed, own.algorithm.cfg.optimizer.learning_rate) == (2, 3e-3)
    assert lines(folder) == lines(alone)
    like = build(own).state
    names = [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()]
    assert len(names) > len([name for name in names if "_best_" in name]) > 0  # the best and the latest
    for name in names:
        there = load_checkpoint(folder / "checkpoints" / name, like)[0]
        assert equal(there, load_checkpoint(alone / "checkpoints" / name, like)[0])


@pytest.mark.slow
def test_the_report_has_the_time_of_all_members_once(trained: PopulationResult, tmp_path: Path) -> None:
    root, *members = map(Run, [trained.run_dir, *runs_in(trained.run_dir)])
    assert [each.together for each in members] == [trained.run_dir.resolve()] * M
    assert root.wall_s is not None and root.wall_s >= trained.elapsed_time_sec - 0.05  # two clocks
    sessions = [each.sessions[0].end - each.sessions[0].start for each in members]
    assert sessions == [each.wall_s for each in members] == [root.wall_s] * M
    assert report([str(trained.run_dir), "--to", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().count("time/compile_s, sum of the logged ones") == 1


@pytest.mark.slow
def test_a_member_that_is_trained_by_itself_is_not_written_beside_it(trained: PopulationResult, tmp_path: Path) -> None:
    run = shutil.copytree(trained.run_dir, tmp_path / "run")
    member = run / "members" / "2"
    with run_lock(member), pytest.raises(CheckpointError, match=f"run {member} is in use by"):
        train_population(config_of(tmp_path, iterations=5), run_dir=run, resume="latest")


@pytest.mark.slow
def test_a_resumed_population_ends_bit_for_bit_as_one_that_went_on(trained: PopulationResult) -> None:
    out = trained.run_dir.parent
    train_population(config_of(out, iterations=2), run_dir=out / "resumed")
    again = train_population(config_of(out), run_dir=out / "resumed", resume="latest")
    like = build_population(config_of(out)).parts.state
    assert trained.latest_checkpoint_path is not None and again.latest_checkpoint_path is not None
    ends = [load_checkpoint(path, like)[0] for path in (trained.latest_checkpoint_path, again.latest_checkpoint_path)]
    assert equal(*ends)
    for part in ("", "members/0", "members/3"):
        assert lines(out / "resumed" / part) == lines(trained.run_dir / part)
    assert again.best_eval_values == trained.best_eval_values


@pytest.mark.slow
def test_a_kill_between_a_save_and_its_evaluation_changes_nothing(
    trained: PopulationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = trained.run_dir.parent
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, RunSink, "_record_evaluation", 2)  # of the second update, which is saved, too
        train_population(config_of(out), run_dir=out / "killed")
    again = train_population(config_of(out), run_dir=out / "killed", resume="latest")
    assert again.best_eval_values == trained.best_eval_values
    for part in ("", "members/0", "members/3"):
        assert lines(out / "killed" / part) == lines(trained.run_dir / part)
    best = [path.name for path in (out / "killed/members").glob("*/checkpoints/*_best_*")]
    assert sorted(best) == sorted(path.name for path in trained.run_dir.glob("members/*/checkpoints/*_best_*"))


@pytest.mark.slow
def test_the_log_of_all_has_summaries_over_members(trained: PopulationResult) -> None:
    rows = [line for line in lines(trained.run_dir) if "eval/avg_reward/iqm" in line]
    members = [line for i in range(M) for line in lines(trained.run_dir / "members" / str(i))]
    last = [line["eval/avg_reward"] for line in members if line["step"] == 4 * STEPS and "eval/avg_reward" in line]
    assert len(rows) == 4 and len(last) == M
    assert rows[-1]["eval/avg_reward/best"] == max(last)
    assert rows[-1]["eval/avg_reward/median"] == pytest.approx(np.median(last))


@pytest.mark.slow
def test_who_wants_a_policy_gets_the_best_member_or_the_one_it_names(trained: PopulationResult) -> None:
    values = [value for value in trained.best_eval_values if value is not None]
    assert trained.best_member == int(np.argmax(values))
    assert open_policy_run(trained.run_dir)[0].path.name == str(trained.best_member)
    metrics = evaluate_run(trained.run_dir, member=2, num_episodes=2, num_envs=2)
    assert Path(str(metrics["checkpoint"])).parts[-4:-2] == ("members", "2")


@pytest.mark.slow
def test_a_member_that_is_not_there_is_refused(trained: PopulationResult) -> None:
    refused(open_policy_run, trained.run_dir, 4, match=r"got member 4; .* has 0 to 3")
    refused(open_policy_run, trained.run_dir / "members" / "0", 1, match="is not a population")


@pytest.mark.slow
def test_the_command_line_goes_on_with_a_population(
    trained: PopulationResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(trained.run_dir), "--resume", "latest"]) == 0
    printed = capsys.readouterr().out
    assert f"best member: {trained.best_member}" in printed and " avg_reward/iqm " in printed


def after_updates(config: RunConfig, num_updates: int = 2) -> list[PyTree]:
    """Each member's ``TrainState``, and then the first member's by itself."""
    built = build_population(config)
    parts: Any = built.parts
    state, _ = parts.stepper.advance(parts.stepper.start(parts.state), num_updates, lambda: False)
    alone = build(built.configs[0])
    moved = alone.stepper.advance(alone.stepper.start(alone.state), num_updates, lambda: False)
    assert moved is not None
    return [jax.tree.map(lambda x, i=i: x[i], state.members.train) for i in range(len(built.members))] + [
        moved[0].train
    ]


@pytest.mark.slow
def test_options_that_are_arrays_give_nearly_the_numbers_of_constants() -> None:
    """Constants such as the 1 − 0.999 of Adam's betas are folded in float64. Measured: 9e-8; without the betas 0."""
    options = PPOConfig()
    names = ("gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm")
    first, second, alone = after_updates(
        population(
            {f"algorithm.cfg.{name}": [getattr(options, name)] for name in names}
            | {RATE: [3e-4, 1e-3], "algorithm.cfg.optimizer.kwargs.betas": [[0.9, 0.999]]}
        )
    )
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), first.params, alone.params)
    assert max(jax.tree.leaves(difference)) < 1e-5
    assert not equal(first.params, second.params)


@pytest.mark.slow
@cases(
    "algorithm",
    GRPO,
    {"name": "apg", "cfg": {"segment_length": 8}},
    {"name": "shac", "cfg": {"segment_length": 8, "critic_epochs": 1, "num_mini_batches": 2}},
    ids=lambda algorithm: algorithm["name"],
)
def test_other_algorithms_have_the_numbers_of_runs_by_themselves(algorithm: dict[str, Any]) -> None:
    """The tests' compiler flags fuse straight-line updates otherwise within the loop over members; without these flags
    APG's and SHAC's are equal too."""
    rates = {RATE: [1e-3, 1e-2]}
    if algorithm["name"] == "shac":
        rates["algorithm.cfg.critic_optimizer.learning_rate"] = [1e-3]
    first, second, alone = after_updates(parse_config({**tiny(), "algorithm": algorithm, "population": rates}))
    for mine, its in zip(jax.tree.leaves(first), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-7)
    assert not equal(first.params, second.params)


@pytest.mark.slow
def test_an_option_that_cannot_be_an_array_is_named() -> None:
    apg = {"name": "apg", "cfg": {"segment_length": 8}}
    given = {"algorithm.cfg.action_adjoint_max_norm": [0.5, 1.0], "algorithm.cfg.gamma": [0.9, 0.8]}
    with pytest.raises(ConfigError) as refused:
        build_population(parse_config({**tiny(), "algorithm": apg, "population": given}))
    assert [problem.key for problem in refused.value.problems] == ["population.algorithm.cfg.action_adjoint_max_norm"]


@pytest.mark.slow
def test_optimizers_whose_zeros_differ_have_one_form() -> None:
    given = {"algorithm.cfg.optimizer.kwargs.weight_decay": [0.0, 0.1]}
    build_population(population(given))


def test_with_values_leaves_the_options_as_they_were() -> None:
    options = PPOConfig()
    changed = with_values(options, {"optimizer.learning_rate": 1.0, "optimizer.kwargs.eps": 2.0, "gamma": 0.5})
    assert (changed.optimizer.learning_rate, changed.optimizer.kwargs["eps"], changed.gamma) == (1.0, 2.0, 0.5)
    assert options == PPOConfig()


@pytest.mark.parametrize("name", ["members", "members/1"])
def test_members_are_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    theirs.mkdir()
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(theirs)
    with pytest.raises(LinkError, match=f"{name} is a symbolic link"):
        train_population(population({"seeds": 2}, output_dir=tmp_path), run_dir=run)
    assert not list(theirs.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_side_by_side_as_on_a_gpu_members_have_nearly_the_numbers_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ejax.population.members.Placement", lambda *, together, mesh: Placement(together=not together, mesh=mesh)
    )
    first, second, alone = after_updates(population({RATE: [1e-3, 3e-3]}))
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), first.params, alone.params)
    assert max(jax.tree.leaves(difference)) < 1e-5
    assert not equal(first.params, second.params)
