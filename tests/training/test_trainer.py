"""A ``Trainer`` of objects: the numbers of the config that describes them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from case_tables import cases, refused
from damages import same, what_is_left
from helpers.tiny import EPISODE, EVALUATED, NUM_ENVS, STEPS, tiny

from ejax.algorithms.ppo import ALGORITHM, PPOConfig
from ejax.collectors.stateful import build_algo
from ejax.config import ConfigError, parse_config
from ejax.envs.task.world import World
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.learner import PPO
from ejax.play.saved_policy import evaluate_run
from ejax.run import train
from ejax.schema.frozen import freeze
from ejax.store.run_dir import RunDirectory
from ejax.trainer import Trainer
from ejax.training.build import build
from ejax.training.callbacks import Callback, TrainingRun
from ejax.types import Env, Policy


def raw(folder: Path | None = None, **trainer: Any) -> dict[str, Any]:
    return tiny(folder, **EVALUATED, **trainer)


def policy_of(config: dict[str, Any]) -> Policy:
    return build(parse_config(config)).policy


def trainer_of(config: dict[str, Any], env: Any = None, **options: Any) -> Trainer:
    env = PointMassRL(max_episode_steps=EPISODE) if env is None else env
    return Trainer(
        env, policy_of(config), ALGORITHM, options=config["algorithm"]["cfg"], **config["trainer"], **options
    )


@pytest.mark.slow
def test_objects_train_to_the_bits_of_the_config_that_names_them(tmp_path: Path) -> None:
    config = raw(tmp_path, save_frequency_updates=1)
    trainer = trainer_of(config)
    mine = trainer.train(run_dir=tmp_path / "objects")
    named = train(parse_config(config), run_dir=tmp_path / "named")
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("objects", "named")), log=True)
    assert mine.best_eval_value == named.best_eval_value
    # the folder describes them: it is evaluated, and gone on with, as any other
    assert trainer.config.env == parse_config(config).env and trainer.config.algorithm == parse_config(config).algorithm
    metrics = [evaluate_run(tmp_path / name, num_episodes=2, num_envs=2) for name in ("objects", "named")]
    assert metrics[0]["eval/avg_reward"] == metrics[1]["eval/avg_reward"]


@pytest.mark.slow
def test_a_trainer_goes_on_with_its_run(tmp_path: Path) -> None:
    config = raw(tmp_path)
    trainer_of(config).train(2 * STEPS, run_dir=tmp_path / "run")
    again = trainer_of(config).train(4 * STEPS, run_dir=tmp_path / "run", resume="latest")
    whole = trainer_of(config).train(4 * STEPS, run_dir=tmp_path / "whole")
    assert again.global_step == whole.global_step == 4 * STEPS
    assert same(*(what_is_left(tmp_path / name, "tiny") for name in ("run", "whole")), log=True)


def test_options_are_a_config_a_mapping_or_the_defaults() -> None:
    config = raw()
    env, policy = PointMassRL(), policy_of(config)
    options = PPOConfig(batch_size=16, n_epochs=1)
    of_config = Trainer(env, policy, ALGORITHM, options=options).config
    of_mapping = Trainer(env, policy, "ppo", options={"batch_size": 16, "n_epochs": 1}).config
    assert of_config == of_mapping and of_config.algorithm.cfg == options
    assert Trainer(env, policy, ALGORITHM).config.algorithm.cfg == PPOConfig()


@dataclass(frozen=True)
class Wrapped:
    """An environment that no registry knows."""

    inner: Env
    bonus: float = 0.5

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        return self.inner.observation_space

    @property
    def action_space(self) -> gymnasium.Space[Any]:
        return self.inner.action_space

    @property
    def max_episode_steps(self) -> int | None:
        return self.inner.max_episode_steps

    def reset(self, key: Any) -> Any:
        return self.inner.reset(key)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        state, timestep = self.inner.step(state, action, key)
        return state, timestep.replace(reward=timestep.reward + self.bonus)


@pytest.mark.slow
def test_an_environment_of_ones_own_needs_no_name(tmp_path: Path) -> None:
    config = raw(tmp_path)
    env = Wrapped(PointMassRL(max_episode_steps=EPISODE))
    mine = trainer_of(config, env).train(run_dir=tmp_path / "mine")
    plain = train(parse_config(config), run_dir=tmp_path / "plain")
    length = mine.last_eval_metrics["eval/avg_length"]
    gained = mine.eval_history[0]["eval/avg_reward"] - plain.eval_history[0]["eval/avg_reward"]
    assert length == EPISODE and gained != 0.0
    assert trainer_of(config, env).train(run_dir=tmp_path / "mine", resume="latest").finished


@pytest.mark.slow
def test_host_environments_are_objects_too(tmp_path: Path) -> None:
    config = tiny(tmp_path, env="gymnasium:Pendulum-v1", **EVALUATED)

    def envs(number: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        return gymnasium.make_vec("Pendulum-v1", number, max_episode_steps=EPISODE)

    policy = policy_of(config)
    options = {"options": config["algorithm"]["cfg"], **config["trainer"]}
    trainer = Trainer(envs(NUM_ENVS), policy, ALGORITHM, eval_env=envs(2), **options)
    trainer.train(run_dir=tmp_path / "objects")
    assert RunDirectory(tmp_path / "objects", "tiny").periodic()
    with pytest.raises(ConfigError, match=r"enable_eval: got true, but an environment outside JAX .* pass eval_env"):
        Trainer(envs(NUM_ENVS), policy, ALGORITHM, **options).train(run_dir=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"num_envs: got 8, but the environment that was given has 4; use 4"):
        Trainer(envs(NUM_ENVS), policy, ALGORITHM, eval_env=envs(2), **options | {"num_envs": 8}).train(
            run_dir=tmp_path / "other"
        )
    assert not (tmp_path / "other").exists()


class Writer:
    """A ``SummaryWriter``'s method."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


class Counter(Callback):
    def __init__(self) -> None:
        self.updates = 0

    def on_update(self, run: TrainingRun, metrics: Any) -> None:
        self.updates += 1


def test_embodichains_arguments_make_the_same_run(tmp_path: Path) -> None:
    config = raw(save_frequency_updates=1)
    cfg, section = config["algorithm"]["cfg"], config["trainer"]
    writer, counters, lines = Writer(), [Counter(), Counter()], dict[int, dict[str, float]]()
    trainer = Trainer(
        policy=policy_of(config),
        env=PointMassRL(max_episode_steps=EPISODE),
        algorithm=build_algo("ppo", cfg, policy_of(config)),
        num_steps=section.pop("buffer_size"),
        batch_size=cfg["batch_size"],
        writer=writer,
        checkpoint_dir=tmp_path / "run" / "checkpoints",
        eval_env=PointMassRL(max_episode_steps=EPISODE),
        callbacks=counters[:1],
        event_cfg={},
        **{name: value for name, value in section.items() if name != "enable_eval"},
    )
    assert trainer.config == parse_config(raw(save_frequency_updates=1))
    result = trainer.train(
        2 * STEPS, callbacks=counters[1:], on_log=lambda step, x: lines.setdefault(step, {}).update(x)
    )
    assert result.run_dir == tmp_path / "run" and result.eval_history
    assert trainer.save_checkpoint() == result.latest_checkpoint_path is not None
    assert [each.updates for each in counters] == [2, 2]
    assert {"eval/avg_reward", "train/loss", "charts/SPS"} <= writer.scalars.keys()
    assert all(lines[step][tag] == value for tag, pairs in writer.scalars.items() for step, value in pairs)
    refused(trainer.train, 2 * STEPS, match="holds a run already", error=FileExistsError)


@cases(
    "arguments text",
    ({"rank": 1}, "rank: comes from what starts the processes"),
    ({"num_steps": 8, "buffer_size": 8}, "num_steps: means the same as buffer_size, which is given too; keep one"),
    ({"event_cfg": {"a": {}}, "events": {}}, "event_cfg: means the same as events"),
    ({"batch_size": 8, "options": {"batch_size": 16}}, "batch_size: got 8, and the algorithm's options have 16"),
    ({"checkpoint_dir": "here"}, r"checkpoint_dir: got here; a run keeps its own in RUN/checkpoints: pass"),
    ({"event_cfg": {"push": {"func": lambda: 0}}}, "push.func: got .*register it by @register_functor"),
    ({"event_cfg": {"push": 3}}, r"trainer\.events\.train\.push: got 3"),
    ({"event_cfg": 3}, r"trainer\.events\.train: got 3"),
    ({"num_env": 4}, "num_env"),
    ({"env": policy_of(raw())}, "env: got ActorCritic, which has no reset; the order is env, policy, algorithm"),
    ids=lambda x: "" if isinstance(x, str) else ", ".join(x),
)
def test_arguments_that_cannot_be_honoured_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Trainer(**{"env": PointMassRL(), "policy": policy_of(raw()), "algorithm": ALGORITHM} | arguments)


def test_a_batch_size_is_the_algorithms() -> None:
    policy = policy_of(raw())
    by_default: Any = Trainer(PointMassRL(), policy, PPO(None, policy), batch_size=32).config.algorithm.cfg
    assert by_default == PPOConfig(batch_size=32)


def nudge(world: World, key: Any, *, by: float) -> World:
    """Move the point: an event of a program's own."""
    del key
    return replace(world, state=replace(world.state, position=world.state.position + by))


EVENTS: dict[str, Any] = {
    "late": {"func": "delay_action", "params": {"steps_range": [1, 1]}},
    "nudged": {"func": nudge, "mode": "interval", "interval_step": 2, "params": {"by": 0.1}},
}
IN_A_FILE = {**EVENTS, "nudged": {**EVENTS["nudged"], "func": f"{nudge.__module__}:nudge"}}


def test_events_are_those_of_the_config() -> None:
    config = raw()
    config["trainer"]["events"] = {"train": IN_A_FILE, "eval": {}}
    named = build(parse_config(config))
    trainer = trainer_of(raw(), event_cfg=EVENTS)
    given = build(trainer.config, objects=trainer.objects)
    assert given.env == named.env != given.eval_env == PointMassRL(max_episode_steps=EPISODE)
    of_eval = trainer_of(raw(), event_cfg={}, eval_event_cfg=EVENTS)
    assert build(of_eval.config, objects=of_eval.objects).eval_env == named.env
    both = trainer_of(raw(), event_cfg=EVENTS, eval_event_cfg=EVENTS)
    assert build(both.config, objects=both.objects).eval_env is None  # one environment serves both


OWN = freeze({"late": EVENTS["late"]})


@dataclass(frozen=True)
class Delayed(PointMassRL):
    """A task with events of its own."""

    randomization: Any = OWN


@pytest.mark.slow
def test_an_environments_own_events_happen() -> None:
    trainer = Trainer(Delayed(), policy_of(raw()), ALGORITHM, options={"batch_size": 16})
    assert build(trainer.config, objects=trainer.objects).env == build(trainer.config).env != Delayed()


@pytest.mark.slow
def test_events_of_environments_outside_jax_are_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, env="gymnasium:Pendulum-v1")
    env = gymnasium.make_vec("Pendulum-v1", NUM_ENVS, max_episode_steps=EPISODE)
    delayed = {"late": EVENTS["late"]}
    trainer = trainer_of(config, env, event_cfg=delayed)
    with pytest.raises(ConfigError, match=r"trainer\.events: act inside JAX, and the environment that was given is"):
        trainer.train(run_dir=tmp_path / "run")
