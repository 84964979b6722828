"""A new run from the whole state of another one."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from flax import struct
from tiny import EPISODE, EVALUATED, tiny

from ejax.algorithms.sac import SACConfig
from ejax.algorithms.step import RunState
from ejax.config import ConfigError, parse_config
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import get_learning_rate, make_actor_critic_optimizer
from ejax.play.saved_policy import evaluate_run
from ejax.run import RunResult, train
from ejax.store.checkpoint import CheckpointError
from ejax.train import main
from ejax.training.warm_start import set_rates
from ejax.types import Array, Key, Timestep, TrainState


def same(a: RunResult, b: RunResult) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a.params, b.params))


@struct.dataclass
class Keyed:
    inner: Any
    key: Key


@dataclass(frozen=True)
class KeyedEnv(PointMassRL):
    """Draws by a typed key in its state, of the other kind than the run's."""

    def reset(self, key: Key) -> tuple[Keyed, Array]:
        inner, obs = super().reset(key)
        return Keyed(inner, jax.random.wrap_key_data(jnp.tile(jax.random.key_data(key), 2), impl="rbg")), obs

    def step(self, state: Keyed, action: Array, key: Key) -> tuple[Keyed, Timestep]:
        own, key_noise = jax.random.split(state.key)
        inner, timestep = super().step(state.inner, action + 0.1 * jax.random.normal(key_noise, action.shape), key)
        return Keyed(inner, own), timestep


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True])
def test_typed_keys_in_a_state_go_on_where_they_were(tmp_path: Path, distributed: bool) -> None:
    extra = {"distributed": distributed, "save_frequency_updates": 1, "keep_checkpoints": 4, **EVALUATED}
    raw = tiny(tmp_path, f"{__name__}:KeyedEnv", env_cfg={"max_episode_steps": EPISODE}, iterations=3, **extra)
    whole = train(parse_config(raw))
    second = checkpoint(whole.run_dir, 64 * (4 if distributed else 1))
    again = train(parse_config(raw), fork=second, run_dir=tmp_path / "forked")
    resumed = train(parse_config(raw), resume=str(second))
    assert same(whole, again) and same(whole, resumed)
    evaluate_run(whole.run_dir, num_episodes=2, num_envs=2)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny(
        tmp_path_factory.mktemp("parent"), iterations=4, save_frequency_updates=1, keep_checkpoints=4, **EVALUATED
    )
    return train(parse_config(raw)).run_dir


def checkpoint(parent: Path, step: int) -> Path:
    return parent / "checkpoints" / f"tiny_step_{step}"


def test_a_fork_with_the_same_config_ends_where_the_run_does_and_leaves_that_as_it_is(
    parent: Path, tmp_path: Path
) -> None:
    files = {path: path.stat().st_mtime_ns for path in parent.rglob("*")}
    raw = tiny(tmp_path, iterations=6)
    straight = train(parse_config(raw), run_dir=tmp_path / "straight")
    forked = train(parse_config(raw), fork=checkpoint(parent, 64), run_dir=tmp_path / "forked")
    assert same(straight, forked)
    assert forked.train_history[0]["global_step"] == 96
    assert {path: path.stat().st_mtime_ns for path in parent.rglob("*")} == files


def test_a_fork_of_a_run_begins_with_its_best_checkpoint(parent: Path, tmp_path: Path) -> None:
    train(parse_config(tiny(tmp_path, iterations=6)), fork=parent, run_dir=tmp_path / "forked")
    versions = json.loads((tmp_path / "forked" / "configs" / "versions.json").read_text())
    assert "best" in Path(versions["origin"]).name


@pytest.mark.slow
@cases(
    "changed rate",
    ({"optimizer": {"learning_rate": 1e-4}}, 1e-4 * (1.0 - 5 / 60)),
    ({"lr_scheduler": {"name": None, "kwargs": {}}}, 3e-4),
)
def test_another_learning_rate_is_the_forks_from_its_first_update(
    parent: Path, tmp_path: Path, changed: dict[str, Any], rate: float
) -> None:
    raw = tiny(tmp_path, iterations=5, ppo=changed)
    forked = train(parse_config(raw), fork=checkpoint(parent, 128))
    assert forked.last_train_metrics["train/learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize(("changed", "rates"), [("optimizer", [0.1, 0.25]), ("critic_optimizer", [0.5, 0.1])])
def test_each_optimizers_rate_is_its_own_in_a_fork(changed: str, rates: list[float]) -> None:
    options = SACConfig(optimizer={"learning_rate": 0.5}, critic_optimizer={"learning_rate": 0.25})
    optimizer = make_actor_critic_optimizer(options.optimizer, options.critic_optimizer)
    networks = {"actor": jnp.ones(2), "critic": jnp.ones(2)}
    state = TrainState(params={"params": networks}, opt_state=optimizer.init(networks), step=jnp.asarray(2))
    meta = {"config": {"algorithm": {"cfg": options.to_dict()}}}
    now = options.replace(**{changed: {"learning_rate": 0.1}})
    config: Any = SimpleNamespace(algorithm=SimpleNamespace(cfg=now), data=None)
    after, notes = set_rates(RunState(update=state.step, train=state, episodes=None), config, meta)
    own = [float(get_learning_rate(after.train.opt_state[name])) for name in ("actor", "critic")]
    assert own == pytest.approx(rates) and notes


@pytest.mark.slow
def test_a_fork_that_was_killed_before_its_first_checkpoint_starts_from_its_origin_again(
    parent: Path, tmp_path: Path
) -> None:
    raw = tiny(tmp_path, iterations=6)
    whole = train(parse_config(raw), fork=checkpoint(parent, 64), run_dir=tmp_path / "whole")
    folder = train(parse_config(raw), fork=checkpoint(parent, 64), run_dir=tmp_path / "killed").run_dir
    for each in (folder / "checkpoints").iterdir():
        each.rename(tmp_path / f"gone_{each.name}")
    again = train(parse_config(raw), resume="latest", run_dir=folder)
    assert same(whole, again)


@pytest.mark.slow
def test_the_command_line_forks_by_the_runs_own_config(parent: Path, tmp_path: Path) -> None:
    options = [f"trainer.output_dir={tmp_path}", "trainer.iterations=5", "trainer.exp_name=branch"]
    assert main(["--fork", str(checkpoint(parent, 96)), *options]) == 0
    (run,) = tmp_path.glob("branch_*")
    assert (run / "checkpoints" / "branch_step_160").is_dir()


@pytest.mark.slow
def test_a_fork_without_a_name_of_its_own_is_named_after_its_source(parent: Path, tmp_path: Path) -> None:
    options = [f"trainer.output_dir={tmp_path}", "trainer.iterations=5"]
    assert main(["--fork", str(checkpoint(parent, 96)), *options]) == 0
    (run,) = tmp_path.glob("tiny_fork_*")
    assert main(["--fork", str(run), *options, "trainer.iterations=6"]) == 0
    assert list(tmp_path.glob("tiny_fork2_*"))


def test_a_fork_that_would_be_over_is_refused_and_leaves_no_folder(parent: Path, tmp_path: Path) -> None:
    raw = tiny(tmp_path, iterations=4)
    with pytest.raises(ConfigError, match=r"trainer\.iterations: means 4 updates, and .* has 4 already"):
        train(parse_config(raw), fork=checkpoint(parent, 128))
    assert not list(tmp_path.iterdir())


def test_a_state_with_other_arrays_is_refused(parent: Path, tmp_path: Path) -> None:
    raw = tiny(tmp_path, iterations=6, num_envs=8)
    refused(lambda: train(parse_config(raw), fork=checkpoint(parent, 64)), match=r"envs", error=CheckpointError)


@pytest.mark.slow
def test_fork_and_resume_are_two_things(parent: Path, tmp_path: Path) -> None:
    refused(lambda: train(parse_config(tiny(tmp_path)), fork=parent, resume="latest"), match="pass only one of them")
    assert main(["--fork", str(parent), "--resume", "latest"]) == 2


@pytest.mark.slow
def test_on_log_sees_each_line_and_stops_the_run_by_false(tmp_path: Path) -> None:
    seen: list[int] = []

    def on_log(step: int, metrics: dict[str, float]) -> bool:
        assert metrics["train/loss"] == metrics["train/loss"]
        seen.append(step)
        return step < 64

    raw = tiny(tmp_path, iterations=40, updates_per_dispatch=1)
    result = train(parse_config(raw), on_log=on_log)
    assert seen[:2] == [32, 64] and not result.finished and result.num_updates <= 4
    resumed = train(parse_config({**raw, "trainer": {**raw["trainer"], "iterations": 5}}), resume="latest")
    assert resumed.finished
