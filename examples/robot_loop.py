"""Run an exported policy against a robot in real time: numpy and onnxruntime, and mujoco in the robot's process.

ejax export RUN --to exported --formats onnx
python examples/robot_loop.py exported --hz 50 --seconds 2 --hold zero --log robot.npz
ejax replay robot.npz

Two processes and a pipe. The robot steps at its own rate: it sends an observation, and applies what has come until the
next step; where nothing has come in time, it repeats, and the deadline counts as missed. The loop answers each
observation, within the contract's bounds and a limit of the change. Where none comes for ``--hold-after`` it holds,
after ``--damp-after`` it damps, until observations come again. Ctrl-C, SIGTERM and Enter are the emergency stop.

A policy that decides on chunks needs ``--chunks METHOD --latency STEPS``: a thread computes a chunk while the one
before is executed, by ``chunk_player.py``, which needs NumPy alone; ``--server`` asks a policy elsewhere.
"""

import argparse
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ACT, HOLD, DAMP, STOP = range(4)
"""Modes of a command. A robot maps DAMP and STOP onto its drives' own; the simulated one is given actions of zero."""
MODES = ("act", "hold", "damp", "stop")


class Link(Protocol):
    """A pipe; on another machine a socket with the same methods."""

    def poll(self, timeout: float) -> bool: ...
    def recv_bytes(self) -> bytes: ...
    def send_bytes(self, data: bytes) -> None: ...


class Step(NamedTuple):
    """A message of the robot: an observation, and the step that led to it."""

    number: int  # 0: the start, no step has led to it
    mode: int
    fresh: bool  # the command answered the observation before; otherwise the deadline was missed
    action: Array  # [A], as it was applied
    obs: Array  # [F], the contract's inputs one after the other

    def pack(self) -> bytes:
        return np.concatenate([[self.number, self.mode, self.fresh], self.action, self.obs]).tobytes()

    @staticmethod
    def unpack(data: bytes, num_actions: int) -> "Step":
        x = np.frombuffer(data)
        return Step(int(x[0]), int(x[1]), bool(x[2]), x[3 : 3 + num_actions], x[3 + num_actions :])


@dataclass
class Watchdog:
    """The mode by the time since the last observation, s."""

    hold_after: float
    damp_after: float
    fed_at: float

    def feed(self, now: float) -> None:
        self.fed_at = now

    def mode(self, now: float) -> int:
        silence = now - self.fed_at
        return DAMP if silence >= self.damp_after else HOLD if silence >= self.hold_after else ACT


@dataclass
class Limits:
    """Bounds of an action and of its change from one step to the next.

    Args:
        low, high: [A]. change: [A], the largest of a step.
    """

    low: Array
    high: Array
    change: Array
    last: Array
    clamped: int = 0
    slowed: int = 0

    def __call__(self, action: Array) -> Array:
        """Limit an action. ValueError: it is not finite."""
        if not np.isfinite(action).all():
            raise ValueError(f"the policy's action is not finite: {action}")
        inside = np.clip(action, self.low, self.high)
        near = np.clip(inside, self.last - self.change, self.last + self.change)
        self.clamped += bool((inside != action).any())
        self.slowed += bool((near != inside).any())
        self.last = near
        return near


def limits_of(contract: Mapping[str, Any], change_rate: float, hz: float) -> Limits:
    """Make limits of the contract's bounds; ``change_rate`` is in widths of their range per second.

    Raises:
        ValueError: an action without bounds.
    """
    action = contract["action"]
    low, high = ([np.nan if x is None else x for x in action.get(name, [None])] for name in ("low", "high"))
    if "chunk" in action:
        raise ValueError("this policy decides on chunks: pass --chunks async, or another way to execute them")
    if np.isnan([*low, *high]).any():
        raise ValueError("this loop needs actions with finite bounds, 'low' and 'high' in contract.json")
    bounds = np.array(low, float), np.array(high, float)
    return Limits(*bounds, change_rate * (bounds[1] - bounds[0]) / hz, np.clip(0.0, *bounds))


def of_single_actions(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Make of a contract of chunks that of their single actions, in the environment without chunks."""
    action, env = dict(contract["action"]), dict(contract["env"])
    chunk = action.pop("chunk")
    action |= {name: action[name][: chunk["shape"][1]] for name in ("low", "high") if name in action}
    env["cfg"] = {name: x for name, x in env["cfg"].items() if name != "action_chunk"}
    env["wrappers"] = [each for each in env.get("wrappers", ()) if "ActionChunk" not in each]
    return {**contract, "action": action, "env": env, "control_rate_hz": chunk["action_rate_hz"]}


class Policy:
    """The export's policy, with its memory, from a flat observation [F] to an action [A]."""

    def __init__(self, directory: Path, contract: Mapping[str, Any]) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # more would wait for each other, beside the robot's process
        file = directory / "policy.onnx"
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._entries = inputs_of(contract)
        sizes = {entry["name"]: entry["shape"][1] for entry in contract["observation"] if entry["name"] == "memory"}
        self._memory = {name: np.zeros((1, size), np.float32) for name, size in sizes.items()}
        self(np.zeros(sum(int(np.prod(entry["shape"][1:])) for entry in self._entries)))  # the first call takes longer
        self._memory = {name: 0 * x for name, x in self._memory.items()}

    def __call__(self, obs: Array) -> Array:
        feed = {name: x[None] for name, x in split(obs, self._entries).items()} | self._memory
        action, *after = self._session.run(["action", *(f"next_{name}" for name in self._memory)], feed)
        self._memory = dict(zip(self._memory, after, strict=True))
        return action[0].astype(float)


def inputs_of(contract: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in contract["observation"] if entry["name"] != "memory"]


def split(obs: Array, entries: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Split observations [..., F] into the contract's arrays."""
    ends = np.cumsum([np.prod(entry["shape"][1:]) for entry in entries])
    pairs = zip(entries, np.split(obs, ends[:-1].astype(int), axis=-1), strict=True)
    return {x["name"]: y.reshape(*obs.shape[:-1], *x["shape"][1:]).astype(x["dtype"]) for x, y in pairs}


@dataclass
class Log:
    """The robot's steps, as ``ejax replay`` reads them."""

    steps: list[Step] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # s, of arrival

    def add(self, step: Step, now: float) -> None:
        self.steps.append(step)
        self.times.append(now)

    def write(self, path: Path, contract: Mapping[str, Any], seed: int) -> int:
        """Write the steps until one is lacking, or was neither the policy's nor held. Returns their number."""
        kept = 0
        while kept < len(self.steps) and self.steps[kept].number == kept and self.steps[kept].mode <= HOLD:
            kept += 1
        steps = self.steps[1:kept]  # the first is the start
        recipe = {name: contract["env"][name] for name in ("id", "cfg")}
        facts = {"recipe": recipe, "seed": seed, "seeded": True, "complete": bool(steps)}
        # entries that the policy does not read are not known, and such an array cannot be compared
        obs = split(np.array([step.obs for step in steps]), inputs_of(contract)) if steps else {}
        whole = {
            f"observation:{x['name']}": obs[x["name"]] for x in inputs_of(contract) if steps and "entries" not in x
        }
        actions = np.array([step.action for step in steps], np.float32)
        more = {"times": np.array(self.times[1:kept]), "modes": np.array([step.mode for step in steps])}
        np.savez_compressed(path, facts=json.dumps(facts), actions=actions, **more, **whole)
        return len(steps)


def control(
    link: Link,
    policy: Callable[[Array], Array],
    limits: Limits,
    watchdog: Watchdog,
    log: Log,
    *,
    hold: str,
    period: float,
    stopped: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, int]:
    """Answer observations until the robot ends or ``stopped``. Returns the number of commands by their mode."""
    sent, number = dict.fromkeys(MODES, 0), 0

    def send(mode: int, action: Array) -> None:
        link.send_bytes(np.concatenate([[number, mode], action]).tobytes())
        sent[MODES[mode]] += 1

    try:
        while not stopped():
            step = None
            if link.poll(period):
                step = Step.unpack(link.recv_bytes(), len(limits.low))
                log.add(step, clock())
                while link.poll(0.0):  # older ones are logged, and the newest is answered
                    step = Step.unpack(link.recv_bytes(), len(limits.low))
                    log.add(step, clock())
            now = clock()
            if step is not None:
                watchdog.feed(now)
                number = step.number
                send(ACT, limits(policy(step.obs)))
            elif mode := watchdog.mode(now):
                send(mode, limits(limits.last if hold == "last" and mode == HOLD else 0 * limits.last))
        send(STOP, 0 * limits.last)
    except (EOFError, ConnectionError):  # the robot has ended
        pass
    except Exception:  # of any kind: the robot stops before it is reported
        send(STOP, 0 * limits.last)
        raise
    return sent


def robot(directory: Path, link: Link, hz: float, seconds: float, silence: tuple[float, float]) -> None:
    """Simulate the task of the export as a robot, in its own process and time; it sends nothing in ``silence``, s."""
    from deployed_task import make_task

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the loop, which sends STOP
    contract, episode = load(directory)
    contract = of_single_actions(contract) if "chunk" in contract["action"] else contract
    try:
        task = make_task(contract, episode)
    except ModuleNotFoundError as error:
        print(
            f"the robot is not simulated: {error.name} is not installed. It sends the export's own observations instead"
        )
        task = Recorded(directory, contract)
    action, mode, answered = np.zeros(len(contract["action"]["low"])), ACT, -1
    start = time.monotonic()
    for number in range(round(hz * seconds) + 1):
        if number > 0:
            time.sleep(max(0.0, start + number / hz - time.monotonic()))
            while link.poll(0.0):
                command = np.frombuffer(link.recv_bytes())
                answered, mode, action = int(command[0]), int(command[1]), command[2:]
            if mode == STOP:
                return
            task.step((action if mode < DAMP else 0 * action).astype(np.float32)[None])
        obs = np.concatenate([np.ravel(x) for x in task.observe().values()])
        if not silence[0] <= number / hz < silence[1]:
            link.send_bytes(Step(number, mode, answered == number - 1, action, obs).pack())
    link.close()  # the loop ends now, not when the process does


class Recorded:
    """A robot that sends observations of ``observations.npz`` and obeys nothing."""

    def __init__(self, directory: Path, contract: Mapping[str, Any]) -> None:
        names = [entry["name"] for entry in contract["observation"]]
        case = "consecutive" if "memory" in names else "environment"
        with np.load(directory / "observations.npz", allow_pickle=False) as file:
            self._obs = {name: file[f"{case}/observation/{name}"] for name in names if name != "memory"}
        self._row = 0

    def observe(self) -> Mapping[str, NDArray[Any]]:
        return {name: x[[self._row % len(x)]] for name, x in self._obs.items()}

    def step(self, action: NDArray[Any]) -> tuple[float, bool]:
        del action
        self._row += 1
        return 0.0, False


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Load the contract, and the episode that the robot starts in."""
    file = directory / "episode.json"
    return json.loads((directory / "contract.json").read_text()), json.loads(
        file.read_text()
    ) if file.exists() else None


def chunk_player(args: argparse.Namespace, contract: Mapping[str, Any], limits: Limits) -> Any:
    """Make what executes the policy's chunks. ValueError: a contract of single actions, or of a policy with memory."""
    from chunk_player import ChunkPlayer, Execution

    if "chunk" not in contract["action"] or len(inputs_of(contract)) < len(contract["observation"]):
        raise ValueError("--chunks is for a policy that decides on chunks, and has no memory")
    if args.server is None and args.chunks == "rtc":
        raise ValueError("policy.onnx cannot continue a plan: serve the run, and pass --server; or --chunks async")
    shape, keeps = contract["action"]["chunk"]["shape"], (args.hold == "last",) * len(limits.low)
    rule = Execution(args.chunks, shape[0], args.latency, args.every, keeps)
    if args.server is None:
        policy = Policy(args.directory, contract)
        return ChunkPlayer(rule, lambda obs, *_: policy(obs).reshape(shape), limits.low, limits.high)
    from serve_client import Client

    client, entries = Client(args.server, os.environ.get("EJAX_SERVE_TOKEN")), inputs_of(contract)
    if args.chunks == "rtc" and not client.metadata["continues"]:
        raise ValueError("--chunks rtc guides a flow, which the served policy is not: pass --chunks async")
    return ChunkPlayer(rule, lambda obs, *plan: client.infer_chunk(split(obs, entries), *plan), limits.low, limits.high)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run an exported policy against a simulated robot in real time.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what ejax export wrote, with policy.onnx")
    parser.add_argument("--hz", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--hold", choices=("zero", "last"), required=True, help="zero where actions are changes")
    parser.add_argument("--hold-after", type=float, default=0.1, metavar="S", help="without an observation")
    parser.add_argument("--damp-after", type=float, default=0.5, metavar="S")
    parser.add_argument("--change-rate", type=float, default=10.0, help="of an action, in ranges of its bounds per s")
    parser.add_argument("--silence", type=float, nargs=2, default=(0.0, 0.0), metavar="S", help="the robot's, from, to")
    parser.add_argument("--log", type=Path, metavar="FILE.npz", help="for ejax replay")
    parser.add_argument("--chunks", metavar="METHOD", help="of a policy in chunks: sync, async, ensemble or rtc")
    parser.add_argument("--latency", type=int, default=0, metavar="STEPS", help="until a chunk is used, at least")
    parser.add_argument("--every", type=int, metavar="STEPS", help="from one chunk to the next")
    parser.add_argument("--server", metavar="URL", help="with --chunks: ejax serve of the same policy")
    args = parser.parse_args()
    whole, episode = load(args.directory)
    contract = of_single_actions(whole) if args.chunks and "chunk" in whole["action"] else whole
    if (trained := contract["control_rate_hz"]) != args.hz:
        print(f"the policy was trained at {trained} Hz, and is run at {args.hz:g} Hz: a step of the task for each")
    limits, log = limits_of(contract, args.change_rate, args.hz), Log()
    policy: Any = chunk_player(args, whole, limits) if args.chunks else Policy(args.directory, contract)
    stops: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stops.append(received))
    keys = sys.stdin.isatty()
    context = multiprocessing.get_context("spawn")
    link, far = context.Pipe()
    process = context.Process(target=robot, args=(args.directory, far, args.hz, args.seconds, tuple(args.silence)))
    process.start()
    far.close()  # so that the robot's end is seen
    link.poll(60.0)  # its start takes seconds, and is no silence
    watchdog = Watchdog(args.hold_after, args.damp_after, time.monotonic())
    sent = control(
        link, policy, limits, watchdog, log, hold=args.hold, period=1.0 / args.hz,
        stopped=lambda: bool(stops or (keys and select.select([sys.stdin], [], [], 0.0)[0])),
    )  # fmt: skip
    process.join(5.0)
    steps = log.steps[1:]
    print(f"{len(steps)} steps, {sum(not step.fresh for step in steps)} deadlines missed; commands: {sent}")
    print(f"{limits.clamped} actions beyond the bounds, {limits.slowed} changes too large")
    if args.chunks:
        print(f"the largest jump at a seam, before the limits, is {policy.largest_jump:.3f} of an action's range")
    if args.log:
        kept = log.write(args.log, contract, 0 if episode is None else episode["seed"])
        print(f"{args.log}: {kept} steps to replay")
    if process.exitcode:
        sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
