"""Results and states as ``print`` and notebooks show them: facts, and no arrays."""

from pathlib import Path

import jax.numpy as jnp
from tiny import tiny

from ejax.config import parse_config
from ejax.play.acting import Actor
from ejax.training.build import build
from ejax.training.callbacks import RunResult
from ejax.training.environments import make_env
from ejax.types import Rollout, Timestep


def test_results_and_states_are_shown_without_their_arrays(tmp_path: Path) -> None:
    config = parse_config(tiny(tmp_path, iterations=1))
    parts = build(config)
    state, policy, params = parts.state, parts.policy, parts.state.train.params
    facts = {"global_step": 32, "num_updates": 1, "elapsed_time_sec": 1.0, "training_fps": 2.0, "finished": True}
    history = [{"reward": 0.5}] * 500
    result = RunResult(policy=policy, params=params, run_dir=tmp_path, train_history=history, **facts)
    actor = Actor(config, make_env("PointMassRL", {}, num_envs=1), policy, params, checkpoint=tmp_path / "x_step_32")
    x = jnp.zeros((3, 2))
    step = Timestep(obs={"a": x, "b": x}, reward=x, terminated=x > 0, truncated=x > 0, info={})
    rollout = Rollout(obs=x, action=x, log_prob=x, value=x, next_value=x, reward=x, terminated=x, truncated=x)
    for shown, words in (
        (result, ["global_step=32", "finished=True", str(tmp_path)]),
        (actor, ["PointMassRL", "actor_critic", "checkpoint="]),
        (state, ["RunState", "arrays of"]),
        (state.train, ["TrainState", "arrays of", "print_tree"]),
        (step, ["Timestep: 5 arrays of 30 numbers"]),
        (rollout, ["Rollout: 8 arrays of 48 numbers"]),
    ):
        text = repr(shown)
        assert all(word in text for word in words) and len(text) < 500 and "Array(" not in text, text
