"""A ROS 2 node of ``robot_loop``: joint states in, an exported policy's actions out, with the same watchdog and limits.

python examples/robot_node.py exported --hz 50 --hold zero

It needs ROS 2's rclpy, sensor_msgs and std_msgs beside numpy and onnxruntime. It has not been run with them: its
messages are tested with stand-ins of their types.

| topic | type | |
|---|---|---|
| joint_states | sensor_msgs/JointState | in: the features "NAME angle", "position", "velocity" and "effort" |
| features | std_msgs/Float64MultiArray | in: the contract's other numbers in order, such as an object's place |
| stop | std_msgs/Bool | in: true is the emergency stop |
| commands | std_msgs/Float64MultiArray | out: the action, in the contract's units, for ros2_control |
| mode | std_msgs/String | out: act, hold, damp or stop; the robot itself must damp where none comes |
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from robot_loop import ACT, HOLD, MODES, STOP, Limits, Policy, Watchdog, inputs_of, limits_of, load

_OF_A_JOINT = {"angle": "position", "position": "position", "velocity": "velocity", "effort": "effort"}
"""Last word of a feature's name -> field of a JointState."""


def feature_names(contract: Mapping[str, Any]) -> list[str]:
    """List the contract's features in order. ValueError: they have no names."""
    entries = inputs_of(contract)
    if nameless := [entry["name"] for entry in entries if not entry.get("features")]:
        raise ValueError(f"'{nameless[0]}' has no names of its numbers in contract.json, by which messages are mapped")
    return [feature["name"] for entry in entries for feature in entry["features"]]


@dataclass
class Observation:
    """The contract's numbers, put together from messages."""

    names: list[str]
    joints: dict[str, float] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)  # s, of each topic's last message

    def take_joints(self, message: Any, now: float) -> None:
        """Take a JointState; joints that the policy does not read are left out."""
        for i, joint in enumerate(message.name):
            for word, part in _OF_A_JOINT.items():
                values = getattr(message, part)  # a driver may leave velocities and efforts empty
                if (name := f"{joint} {word}") in self.names and i < len(values):
                    self.joints[name] = float(values[i])
        self.times["joint_states"] = now

    def take_features(self, message: Any, now: float) -> None:
        self.others = [float(x) for x in message.data]
        self.times["features"] = now

    def read(self) -> tuple[NDArray[np.float64], float] | None:
        """Return the numbers [F], and the time of the older topic; None: a message is still to come.

        Raises:
            ValueError: there are more or fewer numbers than the contract's others.
        """
        rest = [name for name in self.names if name not in self.joints]
        topics = ["joint_states", *(["features"] if rest else [])]
        if not self.times.keys() >= set(topics):
            return None
        if rest and len(rest) != len(self.others):
            raise ValueError(f"'features' has {len(self.others)} numbers; joint_states lacks {', '.join(rest)}")
        numbers = self.joints | dict(zip(rest, self.others, strict=False))
        return np.array([numbers[name] for name in self.names]), min(self.times[topic] for topic in topics)


@dataclass
class Controller:
    """One command for each ``tick``: ``send`` takes the mode's name and the action. A stop lasts until the end."""

    observation: Observation
    policy: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    limits: Limits
    watchdog: Watchdog
    hold: str
    send: Callable[[str, list[float]], None]
    stopped: bool = False

    def tick(self, now: float) -> None:
        """Send a command; none before the first observation. ValueError: no such observation, or no finite action."""
        if self.stopped:
            self.stop()
        elif read := self.observation.read():
            self.watchdog.feed(read[1])
            mode, action = self.watchdog.mode(now), 0 * self.limits.last
            if mode == ACT:
                action = self.policy(read[0])
            elif mode == HOLD and self.hold == "last":
                action = self.limits.last
            self.send(MODES[mode], self.limits(action).tolist())

    def stop(self) -> None:
        self.stopped = True
        self.send(MODES[STOP], [0.0] * len(self.limits.low))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an exported policy as a node of ROS 2.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what ejax export wrote, with policy.onnx")
    parser.add_argument("--hz", type=float, default=50.0)
    parser.add_argument("--hold", choices=("zero", "last"), required=True, help="zero where actions are changes")
    parser.add_argument("--hold-after", type=float, default=0.1, metavar="S", help="without a message")
    parser.add_argument("--damp-after", type=float, default=0.5, metavar="S")
    parser.add_argument("--change-rate", type=float, default=10.0, help="of an action, in ranges of its bounds per s")
    args = parser.parse_args()
    import rclpy
    from sensor_msgs.msg import JointState
    from std_msgs.msg import Bool, Float64MultiArray, String

    contract, _ = load(args.directory)
    limits, observation = limits_of(contract, args.change_rate, args.hz), Observation(feature_names(contract))
    rclpy.init()
    node = rclpy.create_node("ejax_policy")
    commands, modes = node.create_publisher(Float64MultiArray, "commands", 1), node.create_publisher(String, "mode", 1)

    def now() -> float:
        return node.get_clock().now().nanoseconds * 1e-9

    def send(mode: str, action: list[float]) -> None:
        commands.publish(Float64MultiArray(data=action))
        modes.publish(String(data=mode))

    watchdog = Watchdog(args.hold_after, args.damp_after, now())
    controller = Controller(observation, Policy(args.directory, contract), limits, watchdog, args.hold, send)
    node.create_subscription(JointState, "joint_states", lambda message: observation.take_joints(message, now()), 1)
    node.create_subscription(Float64MultiArray, "features", lambda x: observation.take_features(x, now()), 1)
    node.create_subscription(Bool, "stop", lambda message: controller.stop() if message.data else None, 1)
    node.create_timer(1.0 / args.hz, lambda: controller.tick(now()))
    try:
        rclpy.spin(node)
    finally:  # after an error too
        controller.stop()
        node.destroy_node()


if __name__ == "__main__":
    main()
