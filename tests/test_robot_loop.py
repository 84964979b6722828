"""The parts of ``examples/robot_loop.py`` and of its ROS 2 node, by a clock of their own."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from case_tables import refused

from ejax.envs.tasks.point_mass import PointMassRL
from ejax.play import replay
from ejax.policies.chunks import Execution
from ejax.rollout import reset, step

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from chunk_player import ChunkPlayer
from deployed_task import EjaxTask
from robot_loop import (
    ACT,
    DAMP,
    HOLD,
    STOP,
    Limits,
    Log,
    Recorded,
    Step,
    Watchdog,
    chunk_player,
    control,
    limits_of,
    of_single_actions,
)
from robot_node import Controller, Observation, feature_names

PERIOD = 0.02


def test_where_no_task_can_be_simulated_the_robot_sends_what_the_export_has(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "observations.npz", **{"environment/observation/obs": rows})
    robot = Recorded(tmp_path, {"observation": [{"name": "obs"}]})
    seen = []
    for _ in range(3):
        seen.append(robot.observe()["obs"])
        robot.step(np.zeros((1, 2)))
    np.testing.assert_array_equal(np.concatenate(seen), rows[[0, 1, 0]])


def limits() -> Limits:
    return Limits(np.array([-1.0, -1.0]), np.array([1.0, 1.0]), np.array([0.5, 0.5]), np.zeros(2))


class Robot:
    """A link whose robot sends in those steps that are true, and notes each command as ``(step, mode, action)``."""

    def __init__(self, sends: list[bool]) -> None:
        self.sends, self.now, self.commands = sends, 0, list[tuple[int, int, list[float]]]()

    def clock(self) -> float:
        return self.now * PERIOD

    def poll(self, timeout: float) -> bool:
        if timeout == 0.0:
            return False
        if self.now == len(self.sends):
            raise EOFError
        self.now += 1
        return self.sends[self.now - 1]

    def recv_bytes(self) -> bytes:
        return Step(self.now - 1, ACT, True, np.zeros(2), np.array([0.25, -0.25])).pack()

    def send_bytes(self, data: bytes) -> None:
        number, mode, *action = np.frombuffer(data).tolist()
        self.commands.append((int(number), int(mode), action))


def run(robot: Robot, hold: str, policy: Any = lambda obs: obs, stopped: Any = lambda: False) -> dict[str, int]:
    watchdog = Watchdog(2.5 * PERIOD, 4.5 * PERIOD, 0.0)
    options = {"hold": hold, "period": PERIOD, "stopped": stopped, "clock": robot.clock}
    return control(robot, policy, limits(), watchdog, Log(), **options)


@pytest.mark.parametrize(("hold", "held"), [("last", [0.25, -0.25]), ("zero", [0.0, 0.0])])
def test_without_observations_it_holds_then_damps_until_they_come_again(hold: str, held: list[float]) -> None:
    robot = Robot([True] + 6 * [False] + [True])
    sent = run(robot, hold)
    assert [(mode, action) for _, mode, action in robot.commands] == [
        (ACT, [0.25, -0.25]),
        *[(HOLD, held)] * 2,
        *[(DAMP, [0.0, 0.0])] * 2,
        (ACT, [0.25, -0.25]),
    ]
    assert sent == {"act": 2, "hold": 2, "damp": 2, "stop": 0} and robot.commands[-1][0] == 7


def test_a_stop_is_the_last_command_and_so_it_is_where_the_policy_fails() -> None:
    robot = Robot(5 * [True])
    run(robot, "zero", stopped=lambda: robot.now == 3)
    assert [mode for _, mode, _ in robot.commands] == [ACT, ACT, ACT, STOP]
    robot = Robot(5 * [True])
    refused(run, robot, "zero", policy=lambda obs: obs * np.nan, match="the policy's action is not finite")
    assert robot.commands == [(0, STOP, [0.0, 0.0])]


def test_an_action_and_its_change_stay_within_the_contracts_limits() -> None:
    limit = limits_of({"action": {"low": [-1.0, 0.0], "high": [1.0, 4.0]}}, change_rate=12.5, hz=50.0)
    np.testing.assert_allclose(
        [limit(np.array(x)) for x in ([9.0, 1.0], [9.0, 1.5], [0.9, 0.0])], [[0.5, 1], [1, 1.5], [0.9, 0.5]]
    )
    assert (limit.clamped, limit.slowed) == (2, 2)
    for action in ({"low": [None], "high": [1.0]}, {"num_choices": [3]}):
        refused(limits_of, {"action": action}, 1.0, 50.0, match="needs actions with finite bounds")


def test_chunks_are_executed_within_the_limits_and_refused_without_a_method(tmp_path: Path) -> None:
    env = {"cfg": {"action_chunk": 4, "episode_length": 9}, "wrappers": [{"ActionChunk": {"size": 4}}, {"Other": {}}]}
    action = {"low": [-1.0, 0.0] * 4, "high": [1.0, 4.0] * 4, "chunk": {"shape": [4, 2], "action_rate_hz": 25.0}}
    whole = {"observation": [], "action": action, "env": env, "control_rate_hz": 6.25}
    refused(limits_of, whole, 1.0, 50.0, match="this policy decides on chunks: pass --chunks")
    contract = of_single_actions(whole)
    assert contract["action"] == {"low": [-1.0, 0.0], "high": [1.0, 4.0]} and contract["control_rate_hz"] == 25.0
    assert contract["env"] == {"cfg": {"episode_length": 9}, "wrappers": [{"Other": {}}]}
    args = SimpleNamespace(directory=tmp_path, chunks="rtc", latency=1, every=2, hold="zero", server=None)
    with pytest.raises(ValueError, match=r"policy.onnx cannot continue a plan: serve the run, and pass --server"):
        chunk_player(args, whole, limits())
    robot = Robot(5 * [True])
    with ChunkPlayer(Execution("async", 4, 1, 2), lambda *_: np.full((4, 2), 0.75), [-1, -1], [1, 1]) as player:
        run(robot, "zero", policy=player)
    assert [action for _, _, action in robot.commands] == [[0.0, 0.0], [0.5, 0.5], *[[0.75, 0.75]] * 3]


def test_a_log_is_replayed_and_a_robot_that_moved_otherwise_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env, cfg = PointMassRL(max_episode_steps=11), {"max_episode_steps": 11}
    width = env.observation_space.shape[0]
    contract = {
        "env": {"id": "PointMassRL", "cfg": cfg},
        "observation": [{"name": "obs", "shape": ["batch", width], "dtype": "float32"}],
    }
    key_reset, key_steps = jax.random.split(jax.random.key(3))
    carry, log, one_step = reset(env, key_reset, 1), Log(), jax.jit(step, static_argnames="env")
    log.add(Step(0, ACT, True, np.zeros(2), np.asarray(carry.obs[0], float)), 0.0)
    for i in range(1, 9):
        action = np.array([0.1 * i, -0.05])
        carry, timestep = one_step(env, carry, action.astype(np.float32)[None], jax.random.fold_in(key_steps, i - 1))
        mode = DAMP if i == 7 else ACT  # nothing is replayed from there on
        log.add(Step(i, mode, True, action, np.asarray(timestep.final_obs[0], float)), i * PERIOD)
    assert log.write(tmp_path / "robot.npz", contract, seed=3) == 6
    assert replay.main([str(tmp_path / "robot.npz")]) == 0
    assert "6 steps played, all; the largest difference |x − y|/(1 + |y|) is" in capsys.readouterr().out
    log.steps[4] = log.steps[4]._replace(obs=log.steps[4].obs + 0.01)
    log.write(tmp_path / "other.npz", contract, seed=3)
    assert replay.main([str(tmp_path / "other.npz")]) == 1
    assert "of 'obs' at step 4" in capsys.readouterr().out


def test_the_ros_nodes_observation_is_put_together_by_names_and_its_older_topic_feeds_the_watchdog() -> None:
    """``SimpleNamespace`` stands in for sensor_msgs/JointState and std_msgs/Float64MultiArray."""
    features = [{"name": name} for name in ("elbow angle", "cube x", "wrist angle", "wrist velocity")]
    observation = Observation(feature_names({"observation": [{"name": "obs", "features": features}]}))
    sent: list[tuple[str, list[float]]] = []
    watchdog = Watchdog(0.1, 0.5, 0.0)
    controller = Controller(
        observation, lambda obs: obs[:2], limits(), watchdog, "last", lambda *command: sent.append(command)
    )
    observation.take_joints(
        SimpleNamespace(name=["wrist", "other", "elbow"], position=[1.0, 9.0, 0.2], velocity=[3.0], effort=[]), 0.0
    )
    controller.tick(0.0)  # the cube has not been seen
    observation.take_features(SimpleNamespace(data=[0.4]), 0.01)
    np.testing.assert_array_equal(observation.read()[0], [0.2, 0.4, 1.0, 3.0])
    for now in (0.02, 0.2, 0.6):
        controller.tick(now)
    assert sent == [("act", [0.2, 0.4]), ("hold", [0.2, 0.4]), ("damp", [0.0, 0.0])]
    observation.take_features(SimpleNamespace(data=[0.4, 0.5]), 0.7)
    refused(controller.tick, 0.7, match="'features' has 2 numbers; joint_states lacks cube x")
    controller.stop()
    controller.tick(0.8)
    assert sent[3:] == [("stop", [0.0, 0.0])] * 2


def test_the_simulated_robots_last_observation_is_the_ended_episodes() -> None:
    cfg = {"max_episode_steps": 2, "action_scale": 0.2}
    entry = {"name": "obs", "dtype": "float32"}
    task = EjaxTask({"env": {"id": "PlanarReachRL", "cfg": cfg}, "observation": [entry]}, seed=0)
    start = np.array(task.observe()["obs"])
    ends = [task.step(np.ones((1, 2), np.float32))[1] for _ in range(2)]
    assert ends == [False, True]
    np.testing.assert_allclose(task.observe()["obs"][0, :2], start[0, :2] + 2 * 0.2, atol=1e-5)
