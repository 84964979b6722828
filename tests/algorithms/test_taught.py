"""Several teachers, and PPO and GRPO that imitate one: who is asked for which row, the loss and its weight, runs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from test_distill import GRU, NETWORK, PART, Counts, config_of, make_run, refusal, state_of
from tiny import GRPO, NUM_ENVS, NUM_STEPS, tiny

from ejax.algorithms.ppo import ALGORITHM, PPOConfig, ppo_loss
from ejax.algorithms.record import ResetPolicy, Teacher
from ejax.algorithms.taught import Committee, TeacherState, distillation_coef, taught_update
from ejax.algorithms.teaching import DistillationConfig, Responsibility
from ejax.config import parse_config
from ejax.distributions import Normal
from ejax.numerics.episodes import init_episode_stats
from ejax.run import train
from ejax.types import Rollout

KEY = jax.random.key(0)
OBS = np.random.default_rng(0).normal(size=(NUM_STEPS, NUM_ENVS, 6)).astype(np.float32)


class Says:
    """A teacher whose action is its parameter."""

    def init(self, key: Any, obs: Any) -> Any:
        del key, obs
        return jnp.zeros(())

    def apply(self, params: Any, obs: Any) -> Any:
        mean = jnp.broadcast_to(params, (*obs.shape[:-1], 2))
        return Normal(mean, jnp.zeros_like(mean)), mean[..., 0]


@cases(
    "when is_its",
    ({"envs": (0.0, 0.5)}, np.broadcast_to([True, True, False, False], OBS.shape[:2])),
    ({"envs": (0.25, 0.75)}, np.broadcast_to([False, True, True, False], OBS.shape[:2])),
    ({"entries": (3,), "at_least": 0.2}, OBS[..., 3] >= 0.2),
    ({"entries": (3,), "at_least": -0.5, "below": 0.5}, (OBS[..., 3] >= -0.5) & (OBS[..., 3] < 0.5)),
    ({"entries": (0, 4), "below": 1.0}, np.hypot(OBS[..., 0], OBS[..., 4]) < 1.0),
)
@pytest.mark.parametrize("rows", [slice(None), 0], ids=["rollout", "step"])
def test_each_row_is_taught_by_the_first_teacher_responsible(when: dict[str, Any], is_its: Any, rows: Any) -> None:
    assert NUM_ENVS == 4 and 0 < is_its.sum() < is_its.size
    second = Responsibility(entries=(5,), below=0.0)
    policy: Any = Committee(((Says(), None, Responsibility(**when)), (Says(), None, second), (Says(), None, None)))
    says = (jnp.float32(1.0), jnp.float32(2.0), jnp.float32(3.0))
    label, _, _ = jax.jit(policy.apply)(says, OBS[rows], memory=policy.init_memory(NUM_ENVS))
    expected = np.where(is_its, 1.0, np.where(OBS[..., 5] < 0.0, 2.0, 3.0))[rows]
    np.testing.assert_array_equal(label.mode()[..., 0], expected)


def rollout(done: Any, **info: Any) -> Rollout:
    zeros = jnp.zeros(done.shape)
    flags = {"terminated": jnp.asarray(done), "truncated": jnp.zeros(done.shape, bool)}
    numbers = dict.fromkeys(("log_prob", "reward", "value", "next_value"), zeros)
    return Rollout(obs=jnp.asarray(OBS), action=jnp.zeros((*done.shape, 2)), **numbers, **flags, info=info)


def taught(own: TeacherState, config: Any, seen: Rollout, *, restart: bool = False, step: int = 0) -> Any:
    """Update nothing, and return what an update is given, with the teacher's state after it."""
    given: dict[str, Any] = {}

    def update(train: Any, rollout: Rollout, key: Any, *, columns: Any, **rest: Any) -> Any:
        del key, rest
        given.update(columns(rollout))
        return train, {}

    class Train:
        pass

    train: Any = Train()
    train.step = jnp.int32(step)
    policy: Any = Remembers()
    resets = {"resets": lambda options: ResetPolicy(restart=restart), "teacher": Teacher(policy, None)}
    parts: Any = {"policy": None, "optimizer": None, "config": config, "update": update, **resets}
    (_, own), metrics = taught_update((train, own), seen, KEY, **parts)
    return given, own, metrics


class Remembers(Counts):
    """``Counts``, of sequences too."""

    def apply(self, params: Any, obs: Any, *, memory: Any, first: Any) -> Any:
        counts = []
        for step in range(len(obs)):
            memory = jnp.where(first[step][:, None], 0.0, memory)
            counts.append(memory)
            memory = memory + 1.0
        mean = jnp.broadcast_to(jnp.stack(counts), (*obs.shape[:-1], 2))
        return Normal(mean, jnp.zeros_like(mean)), mean[..., 0], memory


@pytest.mark.parametrize("restart", [False, True])
def test_the_teacher_of_a_rollout_remembers_its_episodes(restart: bool) -> None:
    done = np.random.default_rng(1).random((NUM_STEPS, NUM_ENVS)) < 0.3
    options: Any = PPOConfig(distillation=DistillationConfig(teacher="it"))
    own, count = TeacherState(params=None, memory=Remembers().init_memory(NUM_ENVS)), np.zeros(NUM_ENVS)
    for _ in range(2):
        given, own, _ = taught(own, options, rollout(done), restart=restart)
        count = np.zeros(NUM_ENVS) if restart else count
        for shown, ended in zip(np.asarray(given["label"].mode()[..., 0]), done, strict=True):
            np.testing.assert_array_equal(shown, count)
            count = np.where(ended, 0.0, count + 1.0)


@cases(
    "options expected",
    ({}, [2.0, 2.0, 2.0]),
    ({"schedule": {"name": "linear", "kwargs": {"total_iters": 4}}}, [2.0, 1.5, 0.0]),
    ({"schedule": {"name": "step", "kwargs": {"step_size": 4, "gamma": 0.5}}}, [2.0, 2.0, 1.0]),
    # of 100 episodes 25, 25, 25 succeeded: 1 − 0.25/0.5
    ({"until_success": 0.5}, [1.0, 1.0, 1.0]),
    ({"until_success": 0.25}, [0.0, 0.0, 0.0]),
)
def test_the_weight_follows_updates_and_success(options: dict[str, Any], expected: list[float]) -> None:
    section = DistillationConfig.model_validate_json(json.dumps({"teacher": "it", "coef": 2.0, **options}))
    stats = init_episode_stats(NUM_ENVS)
    stats = replace(stats, num_episodes=jnp.int32(100), successes=jnp.arange(100) % 4 == 0)
    weights = [float(distillation_coef(section, jnp.int32(k), stats)) for k in (0, 1, 4)]
    assert weights == pytest.approx(expected)


def test_success_is_that_of_the_last_episodes_and_every_step_has_the_weight() -> None:
    done = np.zeros((NUM_STEPS, NUM_ENVS), bool)
    done[3] = done[7, :2] = True
    options: Any = PPOConfig(distillation=DistillationConfig(teacher="it", until_success=1.0))
    memory = Remembers().init_memory(NUM_ENVS)
    own = TeacherState(params=None, memory=memory, episodes=init_episode_stats(NUM_ENVS))
    success = jnp.broadcast_to(jnp.array([1.0, 0.0, 0.0, 0.0]), done.shape)
    given, own, metrics = taught(own, options, rollout(done, success=success))
    assert float(metrics["distillation_coef"]) == pytest.approx(1.0 - 2 / 6)
    np.testing.assert_allclose(given["label_weight"], np.full(done.shape, 1.0 - 2 / 6), rtol=1e-6)
    refused(lambda: taught(own, options, rollout(done)), match="reports no success")


class Fixed:
    """A policy whose parameters are its distribution."""

    def apply(self, params: Any, obs: Any) -> Any:
        return params, obs


def test_the_loss_has_the_weighted_divergence_from_the_label() -> None:
    mean, target, weight = (
        np.array([[0.0, 1.0], [2.0, -1.0]]),
        np.array([[0.5, 1.0], [1.0, 1.0]]),
        np.array([0.25, 0.75]),
    )
    own, label = (Normal(jnp.asarray(x), jnp.zeros((2, 2))) for x in (mean, target))
    ones = jnp.ones(2)
    batch = dict.fromkeys(("log_prob", "value", "advantage", "value_target"), ones)
    batch |= {"obs": ones, "action": jnp.zeros((2, 2)), "weight": jnp.asarray(weight)}
    squares, coef = np.square(mean - target), np.array([0.3, 0.6])
    policy: Any = Fixed()
    without, _ = ppo_loss(own, batch, policy=policy, config=PPOConfig())
    for loss, expected in (("kl", 0.5 * squares.sum(axis=1)), ("mse", squares.mean(axis=1))):
        config = PPOConfig(distillation=DistillationConfig(teacher="it", loss=loss))  # type: ignore[arg-type]  # of two
        columns = {"label": label, "label_weight": jnp.asarray(coef)}
        value, metrics = ppo_loss(own, batch | columns, policy=policy, config=config)
        assert float(value - without) == pytest.approx(weight @ (coef * expected), rel=1e-5)
        assert float(metrics[f"teacher_{loss}"]) == pytest.approx(weight @ expected, rel=1e-5)
        refused(ppo_loss, own, batch, policy=policy, config=config, match="needs a teacher")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two teachers, one with a memory, both less random than a student."""
    folder, made = tmp_path_factory.mktemp("teachers"), []
    for seed, actor in ((7, NETWORK), (8, GRU)):
        raw = tiny(seed=seed)
        raw["policy"] |= {"initial_log_std": -1.0, "actor": actor}
        made.append(make_run(folder / str(seed), raw))
    return made[0], made[1]


def several(teachers: tuple[Path, Path], **when: Any) -> dict[str, Any]:
    first, second = ({"teacher": str(teacher), "teacher_obs": "critic"} for teacher in teachers)
    return {"teachers": [{**first, "when": when or {"obs": "critic", "entries": [4], "below": 0.0}}, second]}


def with_distillation(algorithm: dict[str, Any], options: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    raw = tiny(**trainer)
    raw["env"]["wrappers"] = [{"AsymmetricEnv": PART}]
    raw["policy"] |= {"obs_groups": {"actor": ["policy"], "critic": ["critic"]}}
    raw["algorithm"] = {"name": algorithm["name"], "cfg": {**algorithm["cfg"], "distillation": options}}
    return raw


def runs(teachers: tuple[Path, Path], name: str, iterations: int) -> dict[str, Any]:
    if name == "distill":
        raw = config_of("", iterations=iterations, actor=GRU, **several(teachers))
        del raw["algorithm"]["cfg"]["teacher"], raw["algorithm"]["cfg"]["teacher_obs"]
        return raw
    algorithm = GRPO if name == "grpo" else tiny(ppo={"n_epochs": 4})["algorithm"]
    algorithm = {**algorithm, "cfg": {**algorithm["cfg"], "optimizer": {"learning_rate": 1e-2}}}
    options = several(teachers) | {"coef": 5.0, "schedule": {"name": "linear", "kwargs": {"total_iters": 6}}}
    outside = {"collector": {"mode": "host"}} if name == "host" else {}
    return with_distillation(algorithm, options, iterations=iterations, **outside)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "ppo", "grpo", "host"])
def test_a_run_comes_near_its_teachers_and_goes_on_with_the_same_bits(
    name: str, teachers: tuple[Path, Path], tmp_path: Path
) -> None:
    whole = runs(teachers, name, 3)
    history = train(parse_config(whole), run_dir=tmp_path / "whole").train_history
    kl = "train/kl" if name == "distill" else "train/teacher_kl"
    assert history[0][kl] > history[-1][kl]
    if name != "distill":
        assert [row["train/distillation_coef"] for row in history] == pytest.approx([5.0, 5.0 * 5 / 6, 5.0 * 4 / 6])
    train(parse_config(runs(teachers, name, 2)), run_dir=tmp_path / "run")
    train(parse_config(whole), resume="latest", run_dir=tmp_path / "run")
    chex.assert_trees_all_equal(*(jax.tree.leaves(state_of(tmp_path / each, whole)) for each in ("whole", "run")))


@cases(
    "options text",
    ({"teacher": "it"}, "got one besides teachers"),
    ({"when": {"entries": [0], "below": 1.0}}, r"distillation.when: is for an entry"),
    ({"teachers": []}, "distillation.teacher: is missing"),
    ({"teachers": [{"teacher": "a"}, {"teacher": "b"}]}, "teachers.0.when: is missing"),
    ({"teachers": [{"when": {"envs": [0.0, 0.5]}}]}, r"teachers.0.teacher: is missing[^$]*teachers.0.when: got a"),
    ({"teachers": [{"teacher": "a", "when": {"envs": [0.5, 1.5]}}]}, "they are shares"),
    ({"teachers": [{"teacher": "a", "when": {"entries": [1]}}]}, "entries ≥ 0 need a limit"),
    ({"teachers": [{"teacher": "a", "when": {}}]}, "set either envs or entries"),
    ({"0.when": {"obs": "critics", "entries": [0], "below": 0.0}}, r"teachers.0.when.obs: .*Did you mean 'critic'"),
    ({"0.when": {"obs": "policy", "entries": [4], "below": 0.0}}, "policy has the numbers 0 to 3"),
    ({"0.teacher_obs": "policy"}, r"teachers.0.teacher: .*this run needs float32\[4, 8\]"),
    ({"population": {"seeds": 2}}, "cannot train a population"),
)
def test_what_does_not_fit_is_refused_by_its_key(options: dict, text: str, teachers: tuple) -> None:
    (name, value), section = *options.items(), several(teachers)
    raw = with_distillation(tiny()["algorithm"], section)
    if name == "population":
        raw[name] = value
    elif name.startswith("0."):
        section["teachers"][0][name.removeprefix("0.")] = value
    else:
        section[name] = value
    assert re.search(text, refusal(raw), re.DOTALL)


def test_teachers_that_act_differently_are_refused(teachers: tuple[Path, Path], tmp_path: Path) -> None:
    raw = tiny()
    raw["policy"]["squash_actions"] = True
    section = several((make_run(tmp_path / "squashes", raw), teachers[1]))
    text = refusal(with_distillation(tiny()["algorithm"], section))
    assert "distributions of several kinds: TanhNormal, Normal" in text


def test_without_distillation_ppo_is_as_it_was() -> None:
    assert ALGORITHM.taught(PPOConfig()) is None and ALGORITHM.make_own is None
