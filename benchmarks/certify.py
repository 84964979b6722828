"""Every number of the tables of results, in docs/benchmarks.md and the README, which are made from what this writes.

A config is trained with several seeds, one after the other; of each run its last checkpoint and its best one are
evaluated in fresh episodes (``trainer.final_eval_episodes``), which chose neither. What is in ``certified.json`` is not
trained again, so that it can be stopped and go on, and seeds be added.

    python benchmarks/certify.py configs/push_cube/ppo.yaml --seeds 5
    python benchmarks/certify.py --table          # write the tables from it; a test compares

A row's name and metrics are written there by hand, and so are ``beside`` (what it is compared with, or why it is below
it), ``readme`` (whether it is on the front page) and ``cloned`` (its steps are samples of demonstrations). One without
``runs`` is quoted: it was measured in another way, and names the page that says how.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from scores import interquartile_mean, train_ours

ROOT = Path(__file__).parents[1]
CERTIFIED = Path(__file__).with_name("certified.json")
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
EPISODES = 1000
_NAMES = {"eval/success_rate": "success", "eval/avg_length": "steps", "eval/avg_reward": "return"}
_HEAD = """\
| task | measure | last checkpoint | lowest seed | highest seed | best checkpoint |
|---|---|---|---|---|---|
"""
_COST_HEAD = """\
| task | seeds | env steps, millions | CPU minutes of a run | to compare with |
|---|---|---|---|---|
"""
_QUOTED_HEAD = """\
| task | measure | result | to compare with | seeds | command in |
|---|---|---|---|---|---|
"""
_SHORT_HEAD = """\
| task | success | env steps, millions | CPU minutes of a run |
|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("configs", nargs="*", type=Path, metavar="CONFIG")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="1 to N")
    parser.add_argument("--task", help="the row's name in the table (default: the config's exp_name)")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "certify", help="folder of the runs")
    parser.add_argument("--certified", type=Path, default=CERTIFIED, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="write the tables")
    args = parser.parse_args()
    for seed in range(1, args.seeds + 1):
        for config in args.configs:
            certify(args.certified, config, seed, args.out, args.task)
    if args.table:
        rows = read(args.certified)
        for page in PAGES:
            page.write_text(with_tables(page, page.read_text(encoding="utf-8"), rows), encoding="utf-8")


def certify(file: Path, path: Path, seed: int, out: Path, task: str | None) -> None:
    """Train one seed and add it to its config's row, if it is not there."""
    rows, name, digest = read(file), str(path.resolve().relative_to(ROOT)), digest_of(path)
    row = next((row for row in rows if row.get("config") == name), None)
    if row is None:
        row = {"task": task or path.stem, "config": name}
        rows.append(row)
    if row.get("config_sha256") != digest:
        row |= {"config_sha256": digest, "runs": []}
    if any(run["seed"] == seed for run in row["runs"]):
        return
    facts = train_ours(path, seed, EPISODES, out)
    run = {"seed": seed, "chosen_by": facts["best"], **facts["fresh"]}
    for which in ("best", "last"):
        run[which] = {key: x for key, x in run[which].items() if key not in ("checkpoint", "seeds")}
    run |= {"env_steps": facts["steps"], "cpu_s": round(facts["cpu_s"], 1), "wall_s": round(facts["wall_s"], 1)}
    run["on"] = f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m')}"
    row["runs"] = sorted([*row["runs"], run], key=lambda run: run["seed"])
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, file)
    print(f"{time.strftime('%H:%M:%S')} {name} seed {seed}: {run}", flush=True)


def read(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def digest_of(path: Path) -> str:
    """Digest what a config says, without its comments."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_tables(page: Path, text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Replace the tables between a page's marks: all results (``certified``), or one number a cell (``results``)."""
    trained = [row for row in rows if "runs" in row]
    whole = "\n".join(
        head + "".join(f"| {' | '.join(line)} |\n" for line in lines)
        for head, lines in (
            (_HEAD, [line for row in trained for line in cells(row)]),
            (_COST_HEAD, [cost_cells(row) for row in trained]),
            (_QUOTED_HEAD, [quoted_cells(row) for row in rows if "runs" not in row]),
        )
    )
    short = _SHORT_HEAD + "".join(f"| {' | '.join(short_cells(row))} |\n" for row in trained if row.get("readme"))
    if page.parent.name == "docs":
        whole = whole.replace("](docs/", "](").replace("](configs/", "](../configs/")
    found, count = text, 0
    for mark, table in {"certified": whole, "results": short}.items():
        begin, end = f"<!-- {mark}: made by benchmarks/certify.py --table -->\n", f"<!-- /{mark} -->\n"
        pattern, made = f"{re.escape(begin)}.*{re.escape(end)}", f"{begin}\n{table}\n{end}"
        found, places = re.subn(pattern, lambda _, made=made: made, found, flags=re.S)
        count += places
    if count != 1:
        raise SystemExit(f"{page.name} has {count} places for a table, between <!-- results … --> marks; it needs one")
    return found


def short_cells(row: Mapping[str, Any]) -> list[str]:
    success, _, _ = over_seeds([run["last"]["eval/success_rate"] for run in row["runs"]])
    name, _, *cost, _ = cost_cells(row)
    return [name, success, *cost]


def cost_cells(row: Mapping[str, Any]) -> list[str]:
    runs = row["runs"]
    minutes, steps = np.median([run["cpu_s"] for run in runs]) / 60, runs[0]["env_steps"] / 1e6
    steps_text = "–" if row.get("cloned") else f"{steps:.1f}"
    return [link(row), str(len(runs)), steps_text, f"{minutes:.1f}", row.get("beside", "–")]


def quoted_cells(row: Mapping[str, Any]) -> list[str]:
    return [row[key] for key in ("task", "measure", "result", "beside", "seeds", "how")]


def cells(row: Mapping[str, Any]) -> list[list[str]]:
    """Make a line of each metric: of the last checkpoints the interquartile mean and the outermost seeds, and of the
    best ones the mean."""
    runs, tags = row["runs"], row.get("metrics", ["eval/success_rate"])
    stale = "" if digest_of(ROOT / row["config"]) == row["config_sha256"] else ", of an earlier config"
    found = {which: {tag: over_seeds([run[which][tag] for run in runs]) for tag in tags} for which in ("last", "best")}
    return [[link(row) + stale, _NAMES[tag], *found["last"][tag], found["best"][tag][0]] for tag in tags]


def link(row: Mapping[str, Any]) -> str:
    return f"[{row['task']}]({row['config']})"


def over_seeds(values: Sequence[float]) -> tuple[str, str, str]:
    """Return the interquartile mean, the lowest and the highest seed's."""
    digits = ".3f" if max(map(abs, values)) <= 1.0 else ",.0f"
    middle, _ = interquartile_mean(np.array(values))
    return f"{middle:{digits}}", f"{min(values):{digits}}", f"{max(values):{digits}}"


if __name__ == "__main__":
    main()
