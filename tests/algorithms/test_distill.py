"""Distillation: whose labels, who acts, who remembers; where a teacher comes from; runs that go on."""

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from pytest import MonkeyPatch
from tiny import EPISODE, NETWORK, NUM_ENVS, NUM_STEPS, STEPS, tiny

from ejax.algorithms import distill
from ejax.algorithms.distill import ALGORITHM, DistillConfig, beta_at, distill_loss, make_distill_step
from ejax.algorithms.record import Teacher
from ejax.algorithms.step import RunState, init_run_state
from ejax.config import parse_config
from ejax.distributions import Categorical, Normal, TanhNormal, action_spec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.wrappers.asymmetric import AsymmetricEnv
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import ActorOnly, NetworkConfig
from ejax.run import train
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import RunDirectory, create_run_directory
from ejax.training.build import build
from ejax.training.steppers import DeviceStepper
from ejax.training.warm_start import start_from_policy
from ejax.types import Array, Key, Params

KEY = jax.random.key(0)
GRU = {**NETWORK, "memory": {"type": "gru", "hidden_size": 5}}
PART: dict[str, Any] = {"observation_indices": [0, 1, 4, 5]}
ENV = AsymmetricEnv(PointMassRL(max_episode_steps=EPISODE), **PART)


@dataclass(frozen=True)
class GoesToTheGoal:
    """A teacher whose action is the goal, two numbers of its observation."""

    def init(self, key: Key, obs: Any) -> Params:
        del key, obs
        return {"params": {}}

    def apply(self, params: Params, obs: Any) -> tuple[Normal, Array]:
        del params
        return Normal(obs[..., 4:6], jnp.zeros_like(obs[..., 4:6])), obs[..., 0]


@dataclass(frozen=True)
class Counts(GoesToTheGoal):
    """A teacher whose action is the number of steps that it has seen of the episode."""

    def init_memory(self, num_rows: int) -> Array:
        return jnp.zeros((num_rows, 1))

    def apply(self, params: Params, obs: Any, *, memory: Array) -> Any:  # type: ignore[override]  # it remembers
        distribution, value = super().apply(params, obs)
        return replace(distribution, mean=distribution.mean * 0.0 + memory), value, memory + 1.0


def student(**fields: Any) -> Any:
    network = NetworkConfig(hidden_sizes=(8,), activation="tanh")
    return ActorOnly(action_spec(ENV.action_space), actor=network, actor_obs_groups=("policy",), **fields)


def play(teacher: Any, monkeypatch: MonkeyPatch, *, num_updates: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Return the input of each update: observations, actions, labels, ends."""

    def spy(state: Any, rollout: Any, label: Any, key: Key, **_: Any) -> Any:
        del key
        seen = {"goal": rollout.obs["critic"][..., 4:6], "action": rollout.action, "done": rollout.done}
        return state, {**seen, "label": label.mode()}

    monkeypatch.setattr(distill, "distill_update", spy)
    config = ALGORITHM.bind(DistillConfig(**options), 10)
    optimizer, policy = make_optimizer(OptimizerConfig()), student()
    taught = Teacher(teacher, teacher.init(KEY, None), "critic")
    state = init_run_state(policy, ENV, optimizer, KEY, num_envs=NUM_ENVS)
    record = ALGORITHM.with_teacher(ALGORITHM, taught) if ALGORITHM.with_teacher else ALGORITHM
    assert record.make_own is not None
    state = replace(state, own=record.make_own(config, policy, ENV, NUM_ENVS))
    step = jax.jit(
        make_distill_step(policy, ENV, optimizer, config, num_steps=NUM_STEPS, dropout=False, teacher=taught)
    )
    log = []
    for number in range(num_updates):
        state, metrics = step(state, jax.random.fold_in(KEY, number))
        log.append({name.removeprefix("train/"): np.asarray(x) for name, x in metrics.items()})
    return log


@pytest.mark.slow
def test_labels_are_the_teachers_of_the_part_that_it_reads(monkeypatch: MonkeyPatch) -> None:
    (seen,) = play(GoesToTheGoal(), monkeypatch)
    assert seen["label"].shape == (NUM_STEPS, NUM_ENVS, 2) and seen["goal"].std() > 0.1
    np.testing.assert_array_equal(seen["label"], seen["goal"])
    assert not np.isclose(seen["action"], seen["label"]).any()  # the student acted


@pytest.mark.slow
def test_with_beta_one_the_teacher_acts_and_with_a_half_every_other_time(monkeypatch: MonkeyPatch) -> None:
    (seen,) = play(GoesToTheGoal(), monkeypatch, beta=1.0)
    np.testing.assert_array_equal(seen["action"], seen["label"])
    (seen,) = play(GoesToTheGoal(), monkeypatch, beta=0.5)
    whole = (seen["action"] == seen["label"]).all(axis=-1)
    assert 0.2 < whole.mean() < 0.8 and seen["beta"] == 0.5


@pytest.mark.slow
def test_a_teacher_remembers_over_updates_and_forgets_between_episodes(monkeypatch: MonkeyPatch) -> None:
    log = play(Counts(), monkeypatch, num_updates=3)
    label, done = (np.concatenate([each[name] for each in log]) for name in ("label", "done"))
    count = np.zeros(NUM_ENVS)
    for shown, ended in zip(label[..., 0], done, strict=True):
        np.testing.assert_array_equal(shown, count)
        count = np.where(ended, 0.0, count + 1.0)
    assert done.any()


def test_beta_falls_linearly_to_zero_and_stays_there() -> None:
    config = ALGORITHM.bind(DistillConfig(beta=0.8), 4)
    assert [round(float(beta_at(jnp.int32(k), config)), 6) for k in range(6)] == [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    refused(lambda: beta_at(jnp.int32(0), DistillConfig(beta=0.8)), match="beta_updates is not set")


class Fixed:
    """A policy whose parameters are its distribution."""

    def apply(self, params: Params, obs: Array) -> Any:
        return params, obs


def loss_of(own: Any, label: Any, loss: Any) -> tuple[float, dict[str, float]]:
    rows = jnp.zeros(2)
    batch = {"obs": rows, "label": label, "weight": jnp.array([0.25, 0.75])}
    value, metrics = distill_loss(own, batch, policy=Fixed(), config=DistillConfig(loss=loss))  # type: ignore[arg-type]
    return float(value), {name: float(x) for name, x in metrics.items()}


def test_each_loss_follows_its_formula() -> None:
    mean, target = np.array([[0.0, 1.0], [2.0, -1.0]]), np.array([[0.5, 1.0], [1.0, 1.0]])
    std, of_teacher, weight = 2.0, 0.5, np.array([0.25, 0.75])
    own = Normal(jnp.asarray(mean), jnp.full((2, 2), np.log(std)))
    label = Normal(jnp.asarray(target), jnp.full((2, 2), np.log(of_teacher)))
    squares = np.square(mean - target)
    nll = (0.5 * squares / std**2 + np.log(std) + 0.5 * np.log(2 * np.pi)).sum(axis=1)
    kl = (np.log(std / of_teacher) + (of_teacher**2 + squares) / (2 * std**2) - 0.5).sum(axis=1)
    expected = {"nll": weight @ nll, "mse": weight @ squares.mean(axis=1), "kl": weight @ kl}
    for name, value in expected.items():
        loss, metrics = loss_of(own, label, name)
        assert loss == pytest.approx(value, rel=1e-5) and metrics[name] == pytest.approx(value, rel=1e-5)


def test_choices_have_an_agreement_and_no_mean() -> None:
    own, label = Categorical(jnp.array([[2.0, 0.0], [0.0, 1.0]])), Categorical(jnp.array([[3.0, 0.0], [1.0, 0.0]]))
    _, metrics = loss_of(own, label, "kl")
    assert metrics["agreement"] == 0.25 and "mse" not in metrics


def config_of(teacher: Any, *, iterations: int = 2, actor: Any = NETWORK, **cfg: Any) -> dict[str, Any]:
    """Train a student that sees no velocities, of a teacher that saw the task's own observation."""
    raw = tiny(iterations=iterations)
    raw["env"]["wrappers"] = [{"AsymmetricEnv": PART}]
    raw["policy"] |= {"actor": actor, "obs_groups": {"actor": ["policy"], "critic": ["critic"]}}
    options = {
        "optimizer": {"learning_rate": 1e-2},
        "n_epochs": 2,
        "batch_size": 16,
        "teacher_obs": "critic",
        "beta": 0.5,
        "beta_updates": 2,
    }
    raw["algorithm"] = {"name": "distill", "cfg": {"teacher": str(teacher), **options, **cfg}}
    return raw


def make_run(folder: Path, raw: dict[str, Any]) -> Path:
    """As if after one update, but with the parameters of a start."""
    config = parse_config(raw)
    directory = create_run_directory(config, folder)
    meta = {"global_step": STEPS, "num_updates": 1, "best_eval_value": None, "config": config.to_dict()}
    directory.save(build(config).state, meta, keep=1)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Less random than a student, which can learn that from anything that it sees."""
    raw = tiny(seed=7)
    raw["policy"]["initial_log_std"] = -1.0
    return make_run(tmp_path_factory.mktemp("teacher") / "run", raw)


@pytest.fixture(scope="module")
def taught(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train a student with a memory for three updates."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    return train(parse_config(config_of(teacher, iterations=3, actor=GRU)), run_dir=folder)


def state_of(run: Path, config: Any) -> RunState:
    return load_checkpoint(RunDirectory(run, "tiny").periodic()[0], build(parse_config(config)).state)[0]


@pytest.mark.slow
def test_a_student_with_memory_learns_what_the_teacher_does(taught: Any) -> None:
    first, second, third = (row["train/kl"] for row in taught.train_history)
    assert first > second > third
    assert {"train/nll", "train/mse", "train/beta"} <= taught.train_history[0].keys()


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(taught: Any, teacher: Path, tmp_path: Path) -> None:
    train(parse_config(config_of(teacher, iterations=2, actor=GRU)), run_dir=tmp_path / "run")
    whole = config_of(teacher, iterations=3, actor=GRU)
    train(parse_config(whole), resume="latest", run_dir=tmp_path / "run")
    chex.assert_trees_all_equal(*(jax.tree.leaves(state_of(run, whole)) for run in (taught.run_dir, tmp_path / "run")))


@pytest.mark.slow
def test_a_teacher_that_changed_is_noticed(taught: Any, teacher: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(taught.run_dir, run)
    aside = teacher.rename(tmp_path / "teacher")
    try:
        make_run(teacher, tiny(seed=8))
        with pytest.raises(CheckpointError, match="not the one that this run was started with"):
            train(parse_config(config_of(teacher, iterations=4, actor=GRU)), resume="latest", run_dir=run)
    finally:
        shutil.rmtree(teacher)
        aside.rename(teacher)


@pytest.mark.slow
def test_a_student_may_see_pictures_where_its_teacher_reads_numbers(tmp_path: Path) -> None:
    teacher = make_run(tmp_path / "teacher", tiny(env="CartPoleRL"))
    raw = config_of(teacher, teacher_obs="state")
    pictures = {"RenderedEnv": {"width": 8, "height": 8, "blank": True}}
    raw["env"] = {"id": "CartPoleRL", "cfg": {"max_episode_steps": EPISODE}, "wrappers": [pictures]}
    raw["policy"] = {"name": "vision", "actor": NETWORK, "cfg": {"channels": [2, 2, 2]}}
    parts = build(parse_config(raw))
    assert isinstance(parts.stepper, DeviceStepper)
    _, metrics = jax.eval_shape(parts.stepper.step, parts.state, KEY)  # traced, not compiled
    assert "train/kl" in metrics


@pytest.mark.slow
def test_devices_compute_what_one_does_with_as_many_strata(teacher: Path, tmp_path: Path) -> None:
    num_devices, results = jax.device_count(), []
    for distributed, among in ((False, num_devices), (True, 1)):
        cfg = {"batch_size": 16 * among, **({} if distributed else {"minibatch_strata": among})}
        raw = config_of(teacher, iterations=1, actor=GRU, **cfg)
        raw["trainer"] |= {"num_envs": NUM_ENVS * among, "distributed": distributed}
        results.append(train(parse_config(raw), run_dir=tmp_path / str(distributed)).params)
    chex.assert_trees_all_close(*results, rtol=1e-7, atol=1e-5)


@pytest.mark.slow
def test_ppo_goes_on_from_the_student(taught: Any) -> None:
    raw = config_of("", actor=GRU)
    raw["algorithm"] = tiny()["algorithm"]
    raw["policy"]["init_from"] = str(taught.run_dir)
    config = parse_config(raw)
    state, _ = start_from_policy(build(config), config)
    chex.assert_trees_all_equal(state.train.params, taught.params)


def refusal(raw: dict[str, Any]) -> str:
    return str(refused(lambda: build(parse_config(raw))))


@cases(
    "options text",
    ({"teacher": None}, "algorithm.cfg.teacher: is missing"),
    ({"teacher": "nowhere"}, "no run of 'nowhere'"),
    ({"teacher_obs": "critics"}, "Did you mean 'critic'"),
    ({"teacher_obs": None}, r"this run needs float32\[18, 8\]"),
    ({"teacher_obs": "policy"}, r"this run needs float32\[4, 8\]"),
    ({"teacher_policy": {"name": "actor_only"}}, "is for EmbodiChain's .pt"),
    ({"beta": 0.0}, "beta is 0"),
    ({"batch_size": STEPS + 1}, f"use at most {STEPS}"),
    ({"sequence_length": 4}, "the policy has no memory"),
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(teacher: Path, options: dict, text: str) -> None:
    raw = config_of(teacher)
    raw["algorithm"]["cfg"] |= options
    assert re.search(text, refusal(raw))


@pytest.mark.slow
def test_two_kinds_of_distributions_have_no_divergence(teacher: Path) -> None:
    raw = config_of(teacher)
    raw["policy"]["squash_actions"] = True
    text = refusal(raw)
    assert "algorithm.cfg.loss" in text and f"{TanhNormal.__name__}, the teacher's {Normal.__name__}" in text
    raw["algorithm"]["cfg"]["loss"] = "nll"
    build(parse_config(raw))


def test_environments_outside_the_program_are_refused_by_name(teacher: Path) -> None:
    raw = config_of(teacher)
    raw["trainer"]["collector"] = {"mode": "host"}
    assert "distill needs an environment inside its program" in refusal(raw)


def test_the_teacher_may_be_a_checkpoint_and_what_differs_is_reported(teacher: Path) -> None:
    checkpoint = RunDirectory(teacher, "tiny").periodic()[0]
    parts, of_run = (build(parse_config(config_of(source))) for source in (checkpoint, teacher))
    chex.assert_trees_all_equal(parts.state.own.params, of_run.state.own.params)
    notes = "\n".join(parts.notes)
    assert f"has learned from {STEPS} steps" in notes and "env.wrappers was []" in notes
