"""Every train config of a repository's history with the gym config that it named then, laid out for config_table.py.

    python benchmarks/config_history.py CLONE FOLDER
    python benchmarks/config_table.py FOLDER --iterations 0

CLONE is a git repository with all its branches and tags; nothing in it is run or checked out. Each distinct pair of
files becomes a folder ``<date>-<train blob>-<gym blob>`` in FOLDER, in which both stand where they stood.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

SUFFIXES = ("*.json", "*.yaml", "*.yml")


class Place(NamedTuple):
    """A file in a commit."""

    date: str
    commit: str
    path: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, metavar="CLONE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    git = partial(run_git, args.clone)
    pairs: dict[tuple[str, str | None], tuple[Place, str | None]] = {}
    for place in sorted(set(train_places(git))):
        train = git("rev-parse", f"{place.commit}:{place.path}").strip()
        gym_path, gym = gym_of(git, place)
        pairs.setdefault((train, gym), (place, gym_path))
    for (train, gym), (place, gym_path) in pairs.items():
        root = args.folder / f"{place.date}-{train[:8]}-{gym[:8] if gym else 'none'}"
        write(git, train, root, place.path)
        if gym and gym_path:
            write(git, gym, root, gym_path)
    trains, gyms = {train for train, _ in pairs}, {gym for _, gym in pairs if gym}
    print(f"{len(pairs)} pairs of {len(trains)} train configs and {len(gyms)} gym configs")


def run_git(clone: Path, *arguments: str) -> str:
    """Return the output of a command; "" where it fails, as for a path that a commit does not have."""
    done = subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True)
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def train_places(git: Any) -> Iterator[Place]:
    """List the places where train configs were written or changed, and those beside a gym config that was."""
    log = git("log", "--all", "-m", "--format=commit %cs %H", "--name-only", "--no-renames", "--", *SUFFIXES)
    date = commit = ""
    for line in log.splitlines():
        if line.startswith("commit "):
            _, date, commit = line.split()
        elif line:
            beside = f"{PurePosixPath(line).parent}/" if "gym_config" in line and "/rl/" in line else line
            for path in git("ls-tree", "-r", "--name-only", commit, beside).splitlines():
                if is_train_config(read(git, commit, path)):
                    yield Place(date, commit, path)


def read(git: Any, commit: str, path: str) -> Any:
    text = git("show", f"{commit}:{path}")
    try:
        return json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return None  # files of other tools, or deleted


def is_train_config(data: Any) -> bool:
    return isinstance(data, dict) and {"trainer", "policy", "algorithm"} <= data.keys()


def gym_of(git: Any, place: Place) -> tuple[str | None, str | None]:
    """Return the path of the gym config that a train config names, and its blob in that commit."""
    named = read(git, place.commit, place.path)["trainer"].get("gym_config")
    if not isinstance(named, str):
        return None, None
    beside = str(PurePosixPath(place.path).parent / PurePosixPath(named).name)
    for path in (named, beside):
        if ".." not in path and (blob := git("rev-parse", "--verify", "--quiet", f"{place.commit}:{path}").strip()):
            return path, blob
    return None, None


def write(git: Any, blob: str, root: Path, path: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(git("cat-file", "blob", blob))


if __name__ == "__main__":
    main()
