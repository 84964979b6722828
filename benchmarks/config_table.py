"""A table in Markdown of EmbodiChain's train configs: those that load and train here, and why the others are refused.

A train config is a JSON or YAML file with the sections ``trainer``, ``policy`` and ``algorithm``. Each runs as
``ejax train --config FILE --device cpu trainer.iterations=…`` would, with nothing else changed but where its
outputs go; files that load to the same run, such as a JSON and a YAML form of it, run once. "Episode": the task and its
time limit in steps. ``config_history.py`` lays out the configs of a repository's history for it.

With ``--files`` the table is of all files instead, by what ``ejax config check`` says of each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ejax.config import ConfigError, RunConfig, load_config
from ejax.config.embodichain.check import check
from ejax.config.files import read_file
from ejax.schema.registry import resolve

SUFFIXES = (".json", ".yaml", ".yml")


class Row(NamedTuple):
    file: str
    loads: bool
    episode: str
    trains: str
    reason: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="searched with all folders below it")
    parser.add_argument("--iterations", type=int, default=1, help="updates of each training; 0: only load (default: 1)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one training (default: 300)")
    parser.add_argument("--files", action="store_true", help="what check says of all files; nothing is trained")
    args = parser.parse_args()
    if args.files:
        print_files(args.folders)
        return
    print("| config | loads | episode | trains | why not |\n|---|---|---|---|---|")
    seen: dict[RunConfig, str] = {}
    loaded: list[bool] = []
    for folder in args.folders:
        for path in train_configs(folder):
            row = judge(path, path.relative_to(folder).as_posix(), args.iterations, args.timeout, seen)
            loaded.append(row.loads)
            loads = "yes" if row.loads else "no"
            print(f"| `{row.file}` | {loads} | {row.episode} | {row.trains} | {row.reason} |", flush=True)
    print(f"\n{sum(loaded)} of {len(loaded)} load, as {len(seen)} different runs")


def print_files(folders: list[Path]) -> None:
    """Print all files with the suffix of a config, by ``check``'s verdict: everything used, or the first refusal."""
    named: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            try:
                refused = [note for note in check(path) if note.status == "unsupported"]
                verdict = refused[0].text if refused else "every key is used, or reported as without effect"
            except ConfigError as error:
                verdict = str(error)
            named.setdefault(verdict, []).append(path.relative_to(folder).as_posix())
    print("| files | such as | `check` says |\n|---|---|---|")
    for verdict, files in sorted(named.items(), key=lambda each: -len(each[1])):
        print(f"| {len(files)} | `{files[0]}` | {_cell(verdict)} |")
    print(f"\n{sum(map(len, named.values()))} files")


def train_configs(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            try:
                data: Any = read_file(path)
            except ConfigError:
                continue  # files of other tools: several documents, or no mapping
            if {"trainer", "policy", "algorithm"} <= data.keys():
                yield path


def judge(path: Path, name: str, iterations: int, timeout: float, seen: dict[RunConfig, str]) -> Row:
    try:
        config = load_config(path, device="cpu")
    except ConfigError as error:
        return Row(name, False, "", "no", _reason(error))
    episode = _episode(config)
    if config in seen:
        return Row(name, True, episode, f"as `{seen[config]}`", "")
    seen[config] = name
    if not iterations:
        return Row(name, True, episode, "not tried", "")
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"trainer.iterations={iterations}", f"trainer.output_dir={folder}"]
        command = [sys.executable, "-m", "ejax.train", "--config", str(path.resolve()), "--device", "cpu", *overrides]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return Row(name, True, episode, "no", f"not done after {timeout:.0f} s")
        seconds = time.perf_counter() - start
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            return Row(name, True, episode, "no", _cell(lines[-1]))
        metrics = next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()
    step = max(json.loads(line)["step"] for line in metrics)
    return Row(name, True, episode, f"{step:,} env steps, {seconds:.0f} s", "")


def _episode(config: RunConfig) -> str:
    gym_config = config.env.cfg.get("gym_config") or {"id": config.env.id}
    env = resolve("env", config.env.id)(**config.env.cfg)
    return f"{gym_config['id']}, {env.max_episode_steps}"


def _reason(error: ConfigError) -> str:
    """Name what is wrong with the robot, or else the first problem; and in which sections the others are."""
    keys = [problem.key.rpartition(":")[2] for problem in error.problems]  # those of the gym config without its path
    shown = next((i for i, key in enumerate(keys) if key.startswith("robot.")), 0)
    others = Counter(key.split(".")[1 if key.startswith("env.") else 0] for i, key in enumerate(keys) if i != shown)
    more = f"; also {', '.join(f'{name} ({count})' for name, count in others.items())}" if others else ""
    return _cell(f"{keys[shown]}: {error.problems[shown].text}{more}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
