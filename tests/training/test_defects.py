"""Defects of EmbodiChain that no other test rules out; benchmarks/notes/defects.md lists them all."""

import importlib
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from shipped import load_shipped
from tiny import NUM_ENVS, STEPS, tiny

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.algorithms.record import find_algorithm
from ejax.algorithms.step import make_rollout_step
from ejax.config import ConfigError, parse_config
from ejax.distributions import Normal
from ejax.episodes import record_episodes
from ejax.optim import make_optimizer
from ejax.rollout import reset, unroll
from ejax.run import train
from ejax.schema.registry import ENVS
from ejax.training.policies import make_policy
from ejax.training.recorder import draw_episodes
from ejax.types import Array, CameraView, Key, Rollout, Timestep, make_train_state

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)
RESETS: list[int] = []


@dataclass(frozen=True)
class Counting:
    """Counts its steps. Cut off after ``length`` steps; 0: never."""

    length: int = 0

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    @property
    def max_episode_steps(self) -> int:
        return self.length

    control_period = 0.1

    def reset(self, key: Key) -> tuple[Array, Array]:
        jax.debug.callback(lambda _: RESETS.append(1), jax.random.key_data(key))  # called for each row of a batch
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, state: Array, action: Array, key: Key) -> tuple[Array, Timestep]:
        del key
        state = state + 1.0
        timestep = Timestep(
            obs=state, reward=action[0], terminated=jnp.zeros((), bool), truncated=state[0] == self.length, info={}
        )
        return state, timestep

    def render(
        self, state: Array, width: int = 640, height: int = 480, camera: CameraView | None = None
    ) -> NDArray[np.uint8]:
        del camera
        return np.full((height, width, 3), int(state[0]), np.uint8)


@dataclass(frozen=True)
class Traced:
    """A policy that notes the shapes it is traced with; ``number`` sets it apart from those already compiled."""

    number: int

    def init(self, key: Key, obs: Any) -> Any:
        del key, obs
        return {"params": {"mean": jnp.zeros(())}}

    def apply(self, params: Any, obs: Array) -> tuple[Normal, Array]:
        SHAPES.append(obs.shape)
        mean = params["params"]["mean"] + jnp.zeros_like(obs)
        return Normal(mean, jnp.zeros_like(mean)), obs[..., 0]


SHAPES: list[tuple[int, ...]] = []


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVS, "Counting", Counting)


def raw(output_dir: Path) -> dict:
    return tiny(output_dir, "Counting", iterations=6)


def test_one_evaluation_of_the_policy_chooses_an_action() -> None:
    """D4. Inside the scan there is one; values of all steps come after it."""
    SHAPES.clear()
    policy = Traced(4)
    carry = reset(Counting(), KEY, 3)
    unroll(policy, Counting(), policy.init(KEY, None), carry, KEY, num_steps=5)
    assert SHAPES == [(3, 1), (5, 3, 1), (5, 3, 1)]


def test_every_algorithm_makes_its_step_from_the_same_arguments() -> None:
    """D11"""
    signatures = {
        name: [(each.name, each.kind) for each in inspect.signature(make).parameters.values()]
        for name in ("apg", "shac")
        if (make := find_algorithm(name).make_step) is not None
    }
    own = [(each.name, each.kind) for each in inspect.signature(make_rollout_step).parameters.values()]
    shared = [each for each in own if each[0] not in ("update", "resets")]  # of the records of PPO and GRPO
    assert signatures["apg"] == signatures["shac"] == shared


def test_each_update_is_logged_once_at_its_own_step_and_environments_are_reset_once(tmp_path: Path) -> None:
    """D12, H18: a line for an update, not for an environment step. D17, H16: nothing resets but the start."""
    RESETS.clear()
    result = train(parse_config(raw(tmp_path)))
    jax.effects_barrier()
    lines = (result.run_dir / "logs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [STEPS * update for update in range(1, 7)]
    assert len(RESETS) == NUM_ENVS


def test_an_action_dim_that_is_not_the_environments_is_refused(tmp_path: Path) -> None:
    """D16: it need not be given, but if it is, it must be right."""
    assert parse_config(raw(tmp_path)).policy.action_dim is None
    with pytest.raises(ConfigError, match=r"policy\.action_dim .*: got 3, but the env's actions have 1"):
        parse_config(raw(tmp_path), ["policy.action_dim=3"])
    policy = parse_config(raw(tmp_path)).policy.model_copy(update={"action_dim": 3})
    with pytest.raises(ConfigError, match=r"policy\.action_dim: got 3"):  # of what is known once it is built
        make_policy(policy, Counting())


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "configs").rglob("*.yaml")), ROOT / "configs/agents/rl/basic/cart_pole/train_config.json"],
    ids=lambda path: f"{path.parent.name}",
)
def test_shipped_configs_evaluate_between_once_an_update_and_once_a_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D27"""
    monkeypatch.chdir(ROOT)
    trainer = load_shipped(path).trainer
    rows = trainer.num_envs * trainer.buffer_size
    assert trainer.enable_eval
    assert rows <= trainer.eval_freq <= rows * trainer.num_updates
    assert trainer.save_freq == 0 or rows <= trainer.save_freq <= rows * trainer.num_updates


@pytest.mark.parametrize(
    "document", ["README.md", "docs/config.md", "docs/data.md", "docs/host_envs.md", "docs/export.md", "docs/torch.md"]
)
def test_what_a_document_names_exists_with_the_arguments_it_shows(document: str) -> None:
    """D14, D15, S10"""
    for name, arguments in re.findall(r"`((?:ejax|interop)\.[\w.]+)(?:\(([^`]*)\))?", (ROOT / document).read_text()):
        try:
            named: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name == "torch":  # what needs it is tested where it is installed
                continue
            module, _, attribute = name.rpartition(".")
            named = getattr(importlib.import_module(module), attribute)
        shown = re.findall(r"\b[a-z]\w*\b", arguments)
        assert set(shown) <= set(inspect.signature(named).parameters if shown else ()), name


def rollout(dropout_seed: Array) -> Rollout:
    """[4, 2]"""
    zeros = jnp.zeros((4, 2))
    return Rollout(
        obs=zeros[..., None],
        action=zeros[..., None],
        log_prob=zeros,
        value=zeros,
        next_value=zeros,
        reward=zeros,
        terminated=zeros > 0,
        truncated=zeros > 0,
        dropout_seed=dropout_seed,
    )


def test_a_field_that_is_not_aligned_with_the_rollout_is_an_error() -> None:
    """S8"""
    config, policy = PPOConfig(batch_size=4), Traced(8)
    optimizer = make_optimizer(config.optimizer)
    params = policy.init(KEY, None)
    state = make_train_state(params, optimizer)
    short = rollout(dropout_seed=jnp.zeros((3, 2), jnp.uint32))
    with pytest.raises(ValueError, match=r"'dropout_seed' has a shape prefix .* \(3, 2\) != \(4, 2\)"):
        ppo_update(state, short, KEY, policy=policy, optimizer=optimizer, config=config)


def test_a_video_ends_with_the_longest_episode_recorded() -> None:
    """H14: the steps played are the environment's limit at most, and nothing is kept of a video once it is written."""
    policy, env = Traced(14), Counting(length=6)
    states, done = record_episodes(policy, env, policy.init(KEY, None), KEY, num_envs=2)
    assert done.shape == (6, 2)
    ended = done.at[2, 0].set(True).at[4, 1].set(True).at[5].set(False)
    frames = list(draw_episodes(env, states, ended, (8, 8)))
    assert len(frames) == 5
    assert frames[-1][0, 0, 0] == 3 and frames[-1][0, 8, 0] == 5  # the one that ended earlier stands still
