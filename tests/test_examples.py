"""The examples run, and do what they say."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ejax import check_env

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.mark.slow
def test_the_own_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load("own_loop", monkeypatch).main(num_updates=3)
    assert -120.0 < reward < 0.0  # an untrained point mass: about −0.7 a step for 100 steps


@pytest.mark.slow
def test_the_own_environment_and_policy_learn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load("own_env", monkeypatch).main(str(tmp_path)) < 0.1


def test_the_task_on_the_front_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "lamp.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert f"```python\n{text}```" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    env = load("lamp", monkeypatch).Lamp()
    assert check_env(env, num_steps=20).startswith("Lamp fits")


def test_the_crane_of_the_manual_is_the_examples() -> None:
    text = (EXAMPLES / "own_robot.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert f"```python\n{text}```" in (EXAMPLES.parent / "docs" / "robots.md").read_text(encoding="utf-8")


def test_the_gymnasium_environment_of_the_manual_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "gym_reach.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert f"```python\n{text}```" in (EXAMPLES.parent / "docs" / "gymnasium.md").read_text(encoding="utf-8")
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    checker.check_env(load("gym_reach", monkeypatch).Reach(), skip_render_check=True)


@pytest.mark.slow
def test_stable_baselines3_trains_on_a_task_of_ejax(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    assert 0.0 <= load("sb3_on_ejax", monkeypatch).main(num_updates=1) <= 1.0


class MjlabStandIn:
    """The interface of mjlab's ``ManagerBasedRlEnv``: row i falls after 2 + i steps, all end after 4; noise in every
    observation; buffers that the next step writes over."""

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(auto_reset=False, scale_rewards_by_dt=True)
        self.num_envs, self.max_episode_length, self.step_dt, self.noise = 3, 4, 0.02, 0.0
        box = SimpleNamespace(shape=(2,), low=-math.inf, high=math.inf)
        self.single_observation_space = SimpleNamespace(spaces={"actor": box, "critic": box})
        self.single_action_space = box
        torch = pytest.importorskip("torch")
        self.count, self.flags = torch.zeros(3), torch.zeros(2, 3, dtype=torch.bool)
        self.reward_manager = SimpleNamespace(active_terms=["upright", "pose"], _step_reward=torch.ones(3, 2))

    def observe(self) -> dict[str, Any]:
        self.noise += 0.125
        return {
            "actor": self.count[:, None] + self.count.new_tensor([0.0, self.noise]),
            "critic": self.count.repeat(2, 1).T,
        }

    def reset(self, *, seed: int | None = None, env_ids: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.count[slice(None) if env_ids is None else env_ids] = 0.0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.count += 1.0
        self.flags[0] = self.count >= self.count.new_tensor([2.0, 3.0, 9.0])
        self.flags[1] = self.count >= 4.0
        return self.observe(), self.reward_manager._step_reward.sum(1) * self.step_dt, *self.flags, {"log": {}}


def test_mjlabs_rows_end_with_their_own_last_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    interop_envs = pytest.importorskip("interop.envs")
    env = interop_envs.TorchVector(load("mjlab_go1", monkeypatch).MjlabVector(MjlabStandIn()))
    env.reset(np.zeros(3, np.uint32))
    steps = [env.step(np.zeros((3, 2), np.float32)) for _ in range(4)]
    counts = [[1, 1, 1], [2, 2, 2], [1, 3, 3], [2, 1, 4]]
    np.testing.assert_array_equal([step.final_obs["actor"][:, 0] for step in steps], counts)
    np.testing.assert_array_equal(
        [step.obs["critic"][:, 0] for step in steps], counts * ~np.array([s.terminated | s.truncated for s in steps])
    )
    np.testing.assert_array_equal([step.terminated for step in steps], [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal([step.truncated for step in steps], [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]])
    # rows that go on keep what they had seen, though a reset draws everyone's noise again
    np.testing.assert_array_equal(steps[1].obs["actor"][1:], steps[1].final_obs["actor"][1:])
    np.testing.assert_allclose(steps[0].info["rewards"]["pose"], 0.02)
    assert env.max_episode_steps == 4 and env.reports() == []
