"""Several processes that train together: equal numbers, and what happens when one dies or hangs.

    python benchmarks/processes.py [--devices 1 2 4 8] [--processes 1 2 4] [--faults kill stop] [--collectors device]
                                   [--large shared]

Trains a small PPO on one CPU device, on two, four and eight, with the same environments, minibatches and strata, and
compares every array of the last checkpoint with one device's. Does the same with four devices in one process, in two
and in four, over loopback. Then it kills, or suspends, one of two processes in the middle of a run,
measures how long the other takes to end, and resumes.

With --collectors host async the processes step four groups of environments outside the program, alternating with the
updates or beside them; the environments themselves are then also continued in fewer and in more processes.

With --large shared the four devices share two copies of a larger policy's parameters; all but the first number of
processes stop half-way and continue.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ejax.store.arrays import read_arrays

ROOT = Path(__file__).parents[1]
NUM_DEVICES = 4
SETTINGS = [
    "trainer.exp_name=run",
    "trainer.num_envs=4",
    "trainer.buffer_size=32",
    "algorithm.cfg.batch_size=32",
    "trainer.num_eval_episodes=8",
    "trainer.eval_freq=4096",
    "trainer.save_freq=2048",
]


COLLECTORS = {
    "device": ["trainer.collector.mode=device"],
    "host": ["trainer.collector.mode=host", "trainer.collector.num_groups=4"],
    "async": ["trainer.collector.mode=async", "trainer.collector.num_groups=4"],
}


class Job:
    """``num_processes`` of one training."""

    def __init__(
        self,
        num_processes: int,
        output: Path,
        *arguments: str,
        num_devices: int = NUM_DEVICES,
        settings: Sequence[str] = SETTINGS,
    ) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            coordinator = f"localhost:{free.getsockname()[1]}"
        flags = f"--xla_force_host_platform_device_count={num_devices // num_processes}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "ejax.train", "--distributed"]
        command += [*settings, f"trainer.output_dir={output}", *arguments]
        self.logs = [output / f"{num_processes}_{time.monotonic_ns()}_{i}.log" for i in range(num_processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            among = ["--coordinator", coordinator, "--num-processes", str(num_processes), "--process-id", str(i)]
            with log.open("w") as out:
                joined = command + (among if num_processes > 1 else [])
                self.processes.append(subprocess.Popen(joined, env=environment, stdout=out, stderr=out))

    def wait(self, timeout: float = 600.0) -> list[int]:
        deadline = time.monotonic() + timeout
        return [process.wait(max(deadline - time.monotonic(), 1.0)) for process in self.processes]

    def await_text(self, text: str, process: int = 0, timeout: float = 600.0) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.logs[process].read_text():
            if time.monotonic() > deadline or self.processes[process].poll() is not None:
                raise RuntimeError(f"'{text}' did not come:\n{self.logs[process].read_text()[-3000:]}")
            time.sleep(0.1)


def arrays_of(run: Path) -> dict[str, np.ndarray]:
    """Load the arrays of a run's newest checkpoint."""
    newest = max(run.glob("checkpoints/run_step_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
    return {name: np.asarray(x) for name, x in read_arrays(newest, read_arrays(newest, None)).items()}


def only_run(output: Path) -> Path:
    (run,) = output.glob("run_*")
    return run


def check(codes: list[int], job: Job, wanted: int = 0) -> None:
    if any(code != wanted for code in codes):
        raise RuntimeError(f"exit codes {codes}:\n" + "\n".join(log.read_text()[-2000:] for log in job.logs))


def compare(folder: Path, kind: str, jobs: Mapping[Any, Job]) -> None:
    """Wait for trainings that should come to the same numbers, and say how far they are apart."""
    reference: dict[str, np.ndarray] = {}
    for count, job in jobs.items():
        check(job.wait(), job)
        arrays = arrays_of(only_run(folder / f"{kind}_{count}"))
        reference = reference or arrays
        floats = [name for name, x in arrays.items() if x.dtype.kind == "f"]
        far = max(float(np.max(np.abs(arrays[name] - reference[name]), initial=0.0)) for name in floats)
        same = sum(arrays[name].tobytes() == x.tobytes() for name, x in reference.items())
        print(f"{count} {kind}: {same} of {len(reference)} arrays have the bits of the first, ", end="")
        print(f"largest difference {far:.2g}", flush=True)


def devices(config: Path, counts: list[int], folder: Path) -> None:
    jobs = {}
    for count in counts:
        (output := folder / f"devices_{count}").mkdir()
        shares = [f"trainer.num_envs={64 // count}", f"algorithm.cfg.batch_size={512 // count}"]
        same = ["algorithm.cfg.minibatch_strata=8", "trainer.iterations=12"]
        jobs[count] = Job(1, output, "--config", str(config), *shares, *same, num_devices=count)
        jobs[count].wait()
    compare(folder, "devices", jobs)


def processes(config: Path, counts: list[int], folder: Path, collector: str) -> None:
    kind = f"processes_{collector}"
    jobs = {}
    for count in counts:
        (output := folder / f"{kind}_{count}").mkdir()
        jobs[count] = Job(count, output, "--config", str(config), "trainer.iterations=12", *COLLECTORS[collector])
        jobs[count].wait()
    compare(folder, kind, jobs)


def large(which: str, counts: list[int], folder: Path) -> None:
    """Train a policy whose parameters the devices share, in each number of processes, with a stop half-way."""
    shared = ["trainer.shard_parameters=2", "trainer.exp_name=run", "trainer.save_frequency_updates=1"]
    config = ROOT / "configs/point_mass/ppo.yaml"
    widths = [f"policy.{network}.network_cfg.hidden_sizes=[256,256]" for network in ("actor", "critic")]
    settings = [*SETTINGS, *shared, *widths, "algorithm.cfg.lr_scheduler.kwargs.total_iters=4"]
    jobs = {}
    for count in counts:
        (output := folder / f"{which}_{count}").mkdir()
        begin = ["--config", str(config)]
        if count != counts[0]:  # the first one is not stopped
            begun = Job(count, output, *begin, "trainer.iterations=2", settings=settings)
            check(begun.wait(), begun)
            begin += ["--run", str(only_run(output)), "--resume", "latest"]
        jobs[count] = Job(count, output, *begin, "trainer.iterations=4", settings=settings)
        jobs[count].wait()
    compare(folder, which, jobs)


def go_on(config: Path, counts: list[int], folder: Path) -> None:
    """Stop half-way, go on in another number of processes, and compare with a run of one that was not stopped."""
    jobs = {}
    for first, then in [(counts[0], counts[0]), *zip(counts, [*counts[1:], counts[0]], strict=True)]:
        name = f"{first}_then_{then}"
        (output := folder / f"go_on_{name}").mkdir()
        # a schedule's horizon is the updates that a run is begun with, unless it is given
        settings = ["--config", str(config), *COLLECTORS["host"], "algorithm.cfg.lr_scheduler.kwargs.total_iters=12"]
        begun = Job(first, output, *settings, f"trainer.iterations={12 if first == then else 8}")
        check(begun.wait(), begun)
        if first != then:
            continued = ["--run", str(only_run(output)), "--resume", "latest", "trainer.iterations=12"]
            begun = Job(then, output, *settings, *continued)
        jobs[name] = begun
    compare(folder, "go_on", jobs)


def fail(config: Path, kind: str, folder: Path, collector: str) -> None:
    """Kill or suspend process 1 of two, see process 0 end, and resume."""
    output = folder / f"fault_{kind}_{collector}"
    output.mkdir()
    job = Job(2, output, "--config", str(config), "trainer.iterations=4000", *COLLECTORS[collector])
    job.await_text("saved ")
    began = time.monotonic()
    job.processes[1].send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
    code = job.processes[0].wait(300)
    seconds = time.monotonic() - began
    job.processes[1].kill()
    text = job.logs[0].read_text()
    # an error of its own, or the words of the coordination service that ends the process
    named = re.findall(r"ejax: .*process 1.*|stopped sending heartbeats\):\n1$", text, re.MULTILINE)
    message = named[-1][:200].replace("\n", " ") if named else text[-500:]
    print(f"{kind}, {collector}: process 0 ended with code {code} after {seconds:.1f} s: {message}")
    if code == 0 or not named:
        raise RuntimeError("the error does not name process 1")
    resumed = Job(2, output, "--run", str(only_run(output)), "--resume", "latest", "trainer.iterations=60")
    check(resumed.wait(), resumed)
    came = re.findall(r"resumed from \S+ at \d+.*", resumed.logs[0].read_text())
    print(f"{kind}: {came[0] if came else 'it started from the beginning'}, and finished", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--faults", nargs="*", default=["kill", "stop"], choices=["kill", "stop"])
    parser.add_argument("--collectors", nargs="*", default=["device"], choices=list(COLLECTORS))
    parser.add_argument("--large", nargs="*", default=[], choices=["shared"])
    args = parser.parse_args()
    config = ROOT / "configs/point_mass/ppo.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        if args.devices:
            devices(config, args.devices, Path(scratch))
        for which in args.large:
            large(which, args.processes, Path(scratch))
        for collector in args.collectors:
            if args.processes:
                processes(config, args.processes, Path(scratch), collector)
            for kind in args.faults:
                fail(config, kind, Path(scratch), collector)
        if "host" in args.collectors and args.processes:
            go_on(config, args.processes, Path(scratch))


if __name__ == "__main__":
    main()
