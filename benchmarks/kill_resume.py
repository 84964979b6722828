"""Kill trainings at random moments, resume them until they end: do they leave the bits of one that was never killed?

    python benchmarks/kill_resume.py --kills 200 --seed 0

Small trainings of each mode, started by the command line as a person does, get SIGKILL: at any moment from the start of
the process on, while they train, or when a checkpoint is half written. After a few kills each is left to end by
itself; then the final checkpoint must agree in each bit, and the log in each number, with the uninterrupted run's.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

import picture_task
import pretrain_tasks
from damages import same, what_is_left

from ejax.config import parse_config
from ejax.data.lerobot.write import EpisodeWriter
from ejax.store.run_dir import create_run_directory
from ejax.training.build import build

_ROOT = Path(__file__).parents[1]
_MOST_KILLS = 5
"""Kills of one training."""
_LIMIT_S = 300.0
"""A process that lives longer hangs."""
_PICTURES = "picture_task:PictureTask"
_EXPERT = "point_expert:make_task"
_SMALL_SEGMENTS = "small_segments:PointMass"
_NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}


def main() -> int:
    args = _parser().parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[-2:])
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        configs = _configs(Path(folder))
        chosen = [Mode(name, configs[name], Path(folder)) for name in args.modes or configs]
        while sum(mode.kills for mode in chosen) < args.kills and not any(mode.faults for mode in chosen):
            min(chosen, key=lambda mode: mode.kills).one_training(rng)
            print(", ".join(f"{mode.name} {mode.kills}" for mode in chosen), flush=True)
    print("| mode | kills | before the run began | while it trained | in a save | trainings | faults |")
    print("|---|---|---|---|---|---|---|")
    for mode in chosen:
        counts = " | ".join(str(mode.moments[moment]) for moment in ("start", "training", "save"))
        print(f"| {mode.name} | {mode.kills} | {counts} | {mode.trainings} | {len(mode.faults)} |")
    for fault in (fault for mode in chosen for fault in mode.faults):
        print(fault)
    return int(any(mode.faults for mode in chosen))


class Mode:
    """Trainings of one config, and what the uninterrupted one left."""

    def __init__(self, name: str, raw: dict[str, Any], folder: Path) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(raw))
        self.kills = self.trainings = 0
        self.moments = {"start": 0, "training": 0, "save": 0}
        self.faults: list[str] = []
        run = self.folder / "whole"
        began = time.monotonic()
        process = self._start(run)
        while not _log(run).exists() and process.poll() is None:
            time.sleep(0.01)
        self.start_s = time.monotonic() - began
        output = process.communicate(timeout=_LIMIT_S)[0]
        if process.returncode:
            raise SystemExit(f"{name}, never killed, ended with {process.returncode}:\n{output}")
        self.training_s = time.monotonic() - began - self.start_s
        self.expected = what_is_left(run, "tiny")
        print(f"{name}: {self.start_s:.1f} s to the first update, {self.training_s:.1f} s of training", flush=True)

    def one_training(self, rng: random.Random) -> None:
        """Start, kill, resume, kill, …, and compare what is left in the end."""
        self.trainings += 1
        run = self.folder / f"run_{self.trainings}"
        output = ""
        for _ in range(rng.randint(2, _MOST_KILLS)):
            process = self._start(run)
            moment = rng.choice(["start", "training", "training", "save", "save"])
            self._wait_for(moment, process, run, rng)
            if process.poll() is not None:
                output = process.communicate()[0]
                break
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.kills += 1
            self.moments[moment] += 1
        else:
            process = self._start(run)
            try:
                output = process.communicate(timeout=_LIMIT_S)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                output = "it hangs"
        self._compare(run, process.returncode, output)

    def _start(self, run: Path) -> "subprocess.Popen[str]":
        """Start a new run, or continue the one in the folder."""
        command = [sys.executable, "-m", "ejax.train", "--config", str(self.folder / "config.json"), "--run", str(run)]
        command += ["--trust", _PICTURES, "--trust", _SMALL_SEGMENTS, "--trust", _EXPERT]
        command += ["--resume", "latest"] if run.exists() else []
        return subprocess.Popen(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def _wait_for(self, moment: str, process: "subprocess.Popen[str]", run: Path, rng: random.Random) -> None:
        """Until the moment to kill, or the process has ended."""
        if moment == "start":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.0, self.start_s))
            return
        lines = _num_lines(run)
        while process.poll() is None and _num_lines(run) <= lines:
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.0, 0.5 * self.training_s))
        while moment == "save" and process.poll() is None:
            if any((run / "checkpoints").glob(".*")):
                time.sleep(rng.choice([0.0, 0.0, rng.uniform(0.0, 0.05)]))
                return
            time.sleep(0.001)

    def _compare(self, run: Path, code: int, output: str) -> None:
        try:
            if code == 0 and same(what_is_left(run, "tiny"), self.expected, log=True):
                return
            what = "other bits, or another log" if code == 0 else f"ended with {code}"
        except Exception as error:
            what = f"nothing to compare: {error}"
        kept = Path(tempfile.mkdtemp(prefix="kill_resume_")) / self.name
        run.rename(kept) if run.exists() else None
        self.faults.append(f"{self.name}, training {self.trainings}: {what}; kept as {kept}\n{output}")


def _log(run: Path) -> Path:
    return run / "logs" / "metrics.jsonl"


def _num_lines(run: Path) -> int:
    return _log(run).read_bytes().count(b"\n") if _log(run).exists() else 0


def _configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Make one config of each mode."""
    ppo = {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 2, "lr_scheduler": {"name": "linear"}}}
    grpo = {"name": "grpo", "cfg": {"batch_size": 16, "n_epochs": 2, "group_size": 2}}
    apg = {"name": "apg", "cfg": {"update_horizon": 8, "segment_length": 4}}
    episodes = folder / "episodes"
    task = pretrain_tasks.Reach()
    with EpisodeWriter(episodes, task.spec(), fps=60) as writer:
        for seed in range(8):
            writer.append(task.generate(seed), "reach the goal", seed=seed)
    data = {"source": "recorded", "folder": str(episodes), "chunk_size": 2}
    bc = {"name": "bc", "cfg": {"batch_size": 32, "updates_per_step": 2}}
    expert = {"task": _EXPERT, "task_cfg": {"num_envs": 2}, "buffer_size": 4, "max_episode_steps": 20}
    rounds = {"source": "engine", "engine": expert, "obs_field": "obs/state", "action_field": "expert_actions"}
    rounds["dagger"] = {"every": 6, "beta_decay": 0.5, "max_episodes": 16}
    gru = _NETWORK | {"memory": {"type": "gru", "hidden_size": 8}}
    teacher = _config(ppo, 40)
    dagger = {
        "teacher": str(_untrained(folder / "teacher", teacher)),
        "batch_size": 16,
        "beta": 0.5,
        "beta_updates": 20,
    }
    gate = {"when": {"entries": [4], "below": 0.0}}
    helped = {"teachers": [{"teacher": dagger["teacher"], **gate}, {"teacher": dagger["teacher"]}]}
    helped |= {"schedule": {"name": "linear"}, "until_success": 0.9}
    flow = {"inference_horizon": picture_task.CHUNK, "model_config": picture_task.MODEL}
    replay = {"capacity": 300, "n_step": 3}
    sac = {"name": "sac", "cfg": {"batch_size": 16, "gradient_steps": 2, "learning_starts": 64, "replay": replay}}
    host, beside = ({"collector": {"mode": mode, "num_groups": 2, "max_staleness": 0}} for mode in ("host", "async"))
    kept = {
        f"sac_{storage}_rows": {**sac, "cfg": {**sac["cfg"], "replay": {**replay, "storage": storage}}}
        for storage in ("host", "shared")
    }
    off_policy = {
        name: _config(kept.get(name, sac), updates, changes, policy="actor_q")
        | {"env": {"id": _SMALL_SEGMENTS, "cfg": {"max_episode_steps": 20}}}
        for name, updates, changes in (
            ("sac", 40, {}),
            ("sac_host", 24, host),
            ("sac_async", 24, beside),
            *((name, 40, {}) for name in kept),
        )
    }
    learned = {"batch_size": 16, "gradient_steps": 2, "learning_starts": 64, "replay": {"capacity": 300}}
    learned["model"] = {"width": 8, "batch_size": 16, "gradient_steps": 2}
    off_policy["model_shac"] = _config({"name": "model_shac", "cfg": learned}, 40)
    for each in off_policy.values():
        each["policy"]["squash_actions"] = True
    legs = _config(ppo, 40)
    legs["policy"]["obs_groups"] = {"actor": ["policy"], "critic": ["critic"]}
    faster = [{"step": 40 * i, "lin_vel_x": [i, i + 1.0]} for i in range(1, 8)]
    stages = {"faster": {"of": "command", "stages": faster}}
    stages["aside"] = {"of": "command", "by": "success", "stages": [{"single": i / 4} for i in range(1, 5)]}
    rates = {"algorithm.cfg.optimizer.learning_rate": [1e-3, 3e-3]}
    return {
        "ppo": _config(ppo, 40),
        "grpo": _config(grpo, 40, policy="actor_only"),
        "apg": _config(apg, 40, policy="actor_only"),
        "host": _config(ppo, 24, {"collector": {"mode": "host"}}),
        "async": _config(ppo, 24, {"collector": {"mode": "async", "num_groups": 2, "max_staleness": 0}}),
        "cloning": _config(bc, 40) | {"data": data},
        "rounds": _config(bc, 40) | {"data": rounds},
        "gru": _config(ppo, 40, network=gru),
        "devices": _config(ppo, 40, {"distributed": True}),
        "pbt": _config(ppo, 40) | {"population": {"seeds": 2, "exploit": {"every": 4}, **rates}},
        "dagger": _config({"name": "distill", "cfg": dagger}, 40, network=gru),
        "taught": _config({**ppo, "cfg": {**ppo["cfg"], "distillation": helped}}, 40),
        **off_policy,
        "curriculum": legs
        | {"env": {"id": "VelocityRL", "cfg": {"max_episode_steps": 20, "physics": "mujoco", "curriculum": stages}}},
        "vla": _config(ppo, 24) | {"env": {"id": _PICTURES}, "policy": {"name": "vla", "vla_config": flow}},
    }


def _untrained(run: Path, raw: dict[str, Any]) -> Path:
    """Make the run of a teacher, with the parameters of a start."""
    config = parse_config(raw)
    meta = {"global_step": 32, "num_updates": 1, "best_eval_value": None, "config": config.to_dict()}
    create_run_directory(config, run).save(build(config).state, meta, keep=1)
    return run


def _config(
    algorithm: dict[str, Any],
    updates: int,
    changes: dict[str, Any] | None = None,
    *,
    policy: str = "actor_critic",
    network: dict[str, Any] = _NETWORK,
) -> dict[str, Any]:
    """Make a config that saves and evaluates every few updates, at once and apart."""
    networks = {"actor": network} | ({"critic": network} if policy != "actor_only" else {})
    rows = 32 if algorithm["name"] != "bc" else 64
    trainer = {
        "exp_name": "tiny",
        "iterations": updates,
        "enable_eval": True,
        "eval_freq": updates // 6 * rows,
        "num_eval_envs": 2,
        "num_eval_episodes": 2,
        "save_frequency_updates": updates // 8,
        "device": "cpu",
    }
    if algorithm["name"] != "bc":
        trainer |= {"num_envs": 4, "buffer_size": 8, **(changes or {})}
    return {
        "env": {"id": "PointMassRL", "cfg": {"max_episode_steps": 20}},
        "trainer": trainer,
        "policy": {"name": policy, "actor_obs_normalization": True, **networks},
        "algorithm": algorithm,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of all modes together (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="of ppo grpo apg host async cloning rounds gru devices pbt dagger taught sac sac_host sac_async "
        "sac_host_rows sac_shared_rows curriculum vla",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
