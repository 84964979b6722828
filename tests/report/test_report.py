"""The report: its numbers are the logs', it names what the logs lack, and the page needs nothing but itself."""

import base64
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases
from tiny import EVALUATED, STEPS, tiny

from ejax.config import parse_config
from ejax.logs.metric_log import SESSIONS, MetricLog
from ejax.report.__main__ import main
from ejax.report.gait import COLUMNS
from ejax.report.runs import Run
from ejax.run import train
from ejax.store.run_dir import create_run_directory

UPDATES = 6
START = 1_700_000_000.0


class Page(HTMLParser):
    """Rows of the tables by their id, as texts and as exact numbers; curves by title and label."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.rows: dict[str, list[list[str]]] = {}
        self.data: dict[str, list[list[float]]] = {}
        self.curves: dict[str, dict[str, dict[str, str]]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self._table = self._title = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in given.items()]
        match tag, given.get("class"):
            case "table", _:
                self._table = given["id"]
                self.rows[self._table], self.data[self._table] = [], []
            case "tr", _:
                self.rows[self._table].append([])
                self.data[self._table].append([])
            case (("td" | "th"), _):
                self.rows[self._table][-1].append("")
            case "data", _:
                if self._table:
                    self.data[self._table][-1].append(float(given["value"]))
            case "svg", "curves":
                self._title = given["data-title"]
                self.curves[self._title] = {}
            case "path", str(kind) if kind.startswith("line "):
                self.curves[self._title][given["data-label"]] = given

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._table and self.rows[self._table] and self.rows[self._table][-1]:
            self.rows[self._table][-1][-1] += data


def values(text: str) -> list[float]:
    return [math.nan if each == "-" else float(each) for each in text.split(" ")]


def make_run(folder: Path, *, seed: int = 1, updates: int = UPDATES, **changes: Any) -> Path:
    """Make a run's folder as a training leaves it, without one: an update each 10 s, every second one evaluated."""
    watched = {"enable_eval": True, "best_eval_metric": "eval/success_rate"}
    config = parse_config({**tiny(seed=seed, iterations=UPDATES, **watched), **changes})
    directory = create_run_directory(config, folder)
    (folder / "logs" / "tiny").mkdir(parents=True)
    (folder / "logs" / "tiny" / f"events.out.tfevents.1.host.{int(START) * 10**9}").touch()
    rng = np.random.default_rng(seed)
    with MetricLog(folder / "logs" / "metrics.jsonl") as log:
        for update in range(1, updates + 1):
            reward, loss = rng.normal(size=2).tolist()
            skipped = {"train/skipped_fraction": 0.25}
            log.write(update * STEPS, {"charts/SPS": 1000.0 / 3, "train/loss": loss, "rewards/near": reward, **skipped})
            if update % 2 == 0:
                log.write(update * STEPS, {"eval/avg_reward": reward, "eval/success_rate": abs(reward) % 1})
        logged = log.so_far()
    lines = [json.loads(line) for line in metrics_of(folder).read_text().splitlines()]
    for line in lines:
        line["time"] = START + 10 * line["step"] / STEPS + (1 if "eval/avg_reward" in line else 0)
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    metrics_of(folder).write_bytes(content)
    logged = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    checkpoint = directory.checkpoints / f"tiny_step_{updates * STEPS}"
    checkpoint.mkdir()
    meta = {"schema_version": 2, "versions": {"jax": "0.10"}, "global_step": updates * STEPS, "num_updates": updates}
    (checkpoint / "meta.json").write_text(json.dumps(meta | {"log": logged, "config": config.to_dict()}))
    return folder


def rewrite(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [change(json.loads(line)) for line in metrics_of(run).read_text().splitlines()]
    metrics_of(run).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def metrics_of(run: Path) -> Path:
    return run / "logs" / "metrics.jsonl"


def logged(run: Path, tag: str) -> dict[int, float]:
    lines = [json.loads(line) for line in metrics_of(run).read_text().splitlines()]
    return {line["step"]: line[tag] for line in lines if tag in line}


def report(*runs: Path, options: tuple[str, ...] = ()) -> Page:
    to = runs[0].parent / "page.html"
    assert main([*map(str, runs), "--to", str(to), *options]) == 0
    return Page(to.read_text())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "one")


def test_each_point_of_a_curve_is_the_logs(run: Path) -> None:
    curves = report(run).curves
    for tag in ("train/loss", "rewards/near", "eval/avg_reward", "eval/success_rate"):
        expected = logged(run, tag)
        assert values(curves[tag]["one"]["data-x"]) == list(expected)
        np.testing.assert_allclose(values(curves[tag]["one"]["data-y"]), list(expected.values()), rtol=1e-6)


def test_the_numbers_of_the_table_are_the_logs(run: Path) -> None:
    success = logged(run, "eval/success_rate")
    best = max(success, key=success.__getitem__)
    last = UPDATES * STEPS
    wall = 10.0 * UPDATES + 1
    (row,) = report(run).data["runs"][1:]
    assert row == [last, wall, 1000 / 3, success[best], best, success[last], last, 0.25 * UPDATES, 0]


def test_a_population_is_its_members_in_their_order(run: Path, tmp_path: Path) -> None:
    population = shutil.copytree(run, tmp_path / "population")
    for index in (0, 2, 10):
        shutil.copytree(run, population / "members" / str(index))
    assert main([str(population), "--to", str(tmp_path / "page.html")]) == 0
    rows = Page((tmp_path / "page.html").read_text()).rows["runs"]
    assert [row[0] for row in rows[1:]] == ["0", "2", "10"]


def test_members_are_named_by_what_differs_and_the_best_is_marked(tmp_path: Path) -> None:
    folder = tmp_path / "population" / "members"
    folder.mkdir(parents=True)
    members = [make_run(folder / str(i), seed=i + 1, **with_rate(10.0**-i)) for i in range(3)]
    (folder.parent / "population.json").write_text('{"best": 1}')
    names = [row[0] for row in report(*members).rows["runs"][1:]]
    rates = ("1.0", "0.1", "0.01")
    assert names == [f"{i} (learning_rate={rates[i]}, seed={i + 1}){' best' * (i == 1)}" for i in range(3)]


def test_the_parts_of_the_time_are_the_sums_of_the_logs(run: Path) -> None:
    rewrite(run, lambda line: line | {"time/train_s": 2.0, "data/age_s": 5.0})
    total, *parts = report(run).data["time"][1:]
    assert (total, parts) == ([10.0 * UPDATES + 1], [[2.0 * UPDATES]])


def test_time_between_a_stop_and_the_next_start_does_not_count(run: Path) -> None:
    rewrite(run, lambda line: line | {"time": line["time"] + 1000 * (line["step"] > 2 * STEPS)})
    (run / "logs" / "tiny" / f"events.out.tfevents.2.host.{int(START + 1015) * 10**9}").touch()
    page = report(run)
    assert page.rows["time"][1][1] == "wall time, 2 starts"
    assert page.data["time"][1:] == [[21.0 + (10.0 * UPDATES + 1 - 15)]]


def record(run: Path, *sessions: tuple[float, float]) -> None:
    lines = [json.dumps({"start": START + start, "end": START + end}) for start, end in sessions]
    (run / "logs" / SESSIONS).write_text("".join(f"{line}\n" for line in lines))


def test_wall_time_is_of_whole_sessions_and_of_killed_ones_as_the_log_says(run: Path) -> None:
    """Three starts, at 0, 15 and 35 s; the second one is killed after its line at 30 s."""
    lines = [json.loads(line) for line in metrics_of(run).read_text().splitlines()]
    metrics_of(run).write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["time"] != START + 20))
    for at in (15, 35):
        (run / "logs" / "tiny" / f"events.out.tfevents.{at}.host.{int(START + at) * 10**9}").touch()
    record(run, (-50, 14), (33, 99))  # building came before the event file, the last save after the last line
    assert [(each.start, each.end) for each in Run(run).sessions] == [
        (START - 50, START + 14),
        (START + 33, START + 99),
        (START + 15, START + 30),
    ]
    assert report(run).rows["time"][1][1] == "wall time, 3 starts"
    assert report(run).data["time"][1] == [64 + 66 + 15]


def test_a_session_without_a_line_in_the_log_counts(run: Path) -> None:
    metrics_of(run).write_text("")
    record(run, (-5, 2))
    assert Run(run).wall_s == 7.0


@pytest.mark.slow
def test_the_wall_time_is_that_of_the_console(tmp_path: Path) -> None:
    began = time.time()
    result = train(parse_config(tiny(tmp_path, iterations=2, **EVALUATED)))
    seconds = time.time() - began
    assert (wall := Run(result.run_dir).wall_s) is not None
    assert result.elapsed_time_sec - 0.05 <= wall <= seconds + 0.05  # two clocks
    result = train(parse_config(tiny(tmp_path, iterations=3, **EVALUATED)), resume="latest", run_dir=result.run_dir)
    assert (both := Run(result.run_dir)).wall_s is not None
    assert len(both.sessions) == 2 and both.wall_s - wall >= result.elapsed_time_sec - 0.05


def test_members_of_one_program_share_its_time(run: Path, tmp_path: Path) -> None:
    population = shutil.copytree(run, tmp_path / "population")
    for index in range(4):
        shutil.copytree(run, population / "members" / str(index))
    record(population, (-40, 70))
    record(population / "members" / "3", (1000, 1005))  # gone on with by itself, later
    lines = [json.loads(line) for line in metrics_of(population).read_text().splitlines()]
    lines[0]["time/compile_s"] = 37.5
    metrics_of(population).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main([str(population), "--to", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert [row[2] for row in page.data["runs"][1:]] == [1000 / 3] * 4
    assert [row[1] for row in page.data["runs"][1:]] == [110.0] * 3 + [115.0]
    names = [row[0] for row in page.rows["time"][1:]]
    assert names[:3] == ["0 … 2: one program for the whole population", "", "3"]
    assert page.data["time"][1:4] == [[110.0], [37.5], [115.0]]


def test_runs_that_differ_in_the_seed_are_one_curve_of_median_and_quartiles(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate("abc", 1)]
    ((label, curve),) = report(*runs).curves["train/loss"].items()
    assert label == "a + b + c (3 runs)"
    values_of = [list(logged(each, "train/loss").values()) for each in runs]
    for name, q in (("low", 25), ("y", 50), ("high", 75)):
        np.testing.assert_allclose(values(curve[f"data-{name}"]), np.percentile(values_of, q, axis=0), rtol=1e-6)
    assert set(curve["data-n"].split(" ")) == {"3"}


def test_the_name_of_a_group_is_what_its_runs_have_in_common_alone(tmp_path: Path) -> None:
    pairs = [(f"{kind}_{seed}", seed, gamma) for kind, gamma in (("far", 0.99), ("near", 0.5)) for seed in (1, 2)]
    algorithm = tiny()["algorithm"]
    runs = [
        make_run(tmp_path / name, seed=seed, algorithm={**algorithm, "cfg": {**algorithm["cfg"], "gamma": gamma}})
        for name, seed, gamma in pairs
    ]
    assert list(report(*runs).curves["train/loss"]) == ["gamma=0.99 (2 runs)", "gamma=0.5 (2 runs)"]
    assert list(report(*runs[:2]).curves["train/loss"]) == ["far_… (2 runs)"]


def test_the_median_is_of_the_runs_that_come_so_far(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=2, updates=2))
    (curve,) = page.curves["train/loss"].values()
    assert curve["data-n"].split(" ") == ["2", "2", "1", "1", "1", "1"]
    assert f"not finished: 2 of {UPDATES} updates" in page.text


def with_rate(rate: float) -> dict[str, Any]:
    algorithm = tiny()["algorithm"]
    return {"algorithm": {**algorithm, "cfg": {**algorithm["cfg"], "optimizer": {"learning_rate": rate}}}}


def test_a_sweep_is_sorted_by_its_best_and_drawn_by_key(tmp_path: Path) -> None:
    rates = {"a": 1e-4, "b": 1e-3, "c": 1e-2}
    runs = {name: make_run(tmp_path / name, seed=i, **with_rate(x)) for i, (name, x) in enumerate(rates.items(), 1)}
    page = report(*runs.values())
    best = {name: max(logged(each, "eval/success_rate").values()) for name, each in runs.items()}
    order = sorted(best, key=lambda name: -best[name])
    assert [row[0] for row in page.rows["sweep"][1:]] == order
    assert [row[0] for row in page.data["sweep"][1:]] == [best[name] for name in order]
    differing = {row[0]: row[1:] for row in page.rows["differences"][1:]}
    assert differing["algorithm.cfg.optimizer.learning_rate"] == ["0.0001", "0.001", "0.01"]


def test_lines_that_are_damaged_missing_or_cut_short_are_told(run: Path) -> None:
    lines = metrics_of(run).read_bytes().splitlines(keepends=True)
    del lines[1]
    lines[3], lines[-1] = b"?\n", lines[-1][:20]
    metrics_of(run).write_bytes(b"".join(lines))
    text = report(run).text
    assert "line 4 was not written by ejax, and left out" in text
    assert f"its last line, {len(lines)}, was cut short" in text
    assert "metrics.jsonl lacks lines that it had since the checkpoint was made" in text
    assert f"a line each {STEPS} steps, but none between {STEPS} and {3 * STEPS}, {3 * STEPS} and" in text


BIG = "1" + "0" * 400
UNREADABLE = [
    f'{{"step": {BIG}, "train/loss": 1.0}}',
    f'{{"step": 1, "train/loss": {BIG}}}',
    '{"step": 1, "train/loss": Infinity}',
    '{"step": 1, "time": 1.797e308}',
    '{"step": 1, "a\\ud800": 1.0}',
]


def spoil(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


@cases(
    "change text",
    (lambda run: metrics_of(run).unlink(), "metrics.jsonl is not there"),
    *((spoil("logs/metrics.jsonl", "{", f"{line}\n{{"), "not written by ejax") for line in UNREADABLE),
    (spoil("configs/resolved.json", '"gamma"', '"gamma" '), "are damaged"),
    (spoil("configs/resolved.json", "PointMassRL", "no.such.module:Env"), "no.such.module:Env, ppo"),
    (spoil("configs/resolved.json", "PointMassRL", "mass\\ud800"), "mass\\ud800, ppo"),
    # which would take an hour; there are holes alone in it
    (lambda run: os.truncate(run / "configs/versions.json", 1 << 40), "cannot be read: has 1099511627776 bytes"),
)
def test_what_is_damaged_missing_or_odd_is_named(run: Path, change: Callable[[Path], object], text: str) -> None:
    change(run)
    assert text in report(run).text


def test_a_page_that_cannot_be_written_leaves_no_part_of_it(run: Path) -> None:
    (run.parent / "page.html").mkdir()
    assert main([str(run), "--to", str(run.parent / "page.html")]) == 2
    assert not list(run.parent.glob(".*partial"))


def test_a_value_that_is_not_finite_is_a_hole_and_told(run: Path) -> None:
    loss = logged(run, "train/loss")[2 * STEPS]
    metrics_of(run).write_text(metrics_of(run).read_text().replace(json.dumps(loss), "null"))
    page = report(run)
    assert math.isnan(values(page.curves["train/loss"]["one"]["data-y"])[1])
    assert "train/loss was not finite in 1 of the lines" in page.text


def test_a_fork_begins_at_another_runs_step(run: Path) -> None:
    lines = metrics_of(run).read_text().splitlines(keepends=True)
    metrics_of(run).write_text("".join(line for line in lines if json.loads(line)["step"] > 3 * STEPS))
    assert "but none between 0 and" in report(run).text
    file = run / "configs" / "versions.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"origin": "/elsewhere/tiny_step_9"}))
    assert "but none between" not in report(run).text


def test_numbers_too_large_to_draw_are_holes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(i), seed=i, **with_rate(i * 1e-3)) for i in (1, 2, 3)]
    for run, sign in zip(runs, ("", "-", ""), strict=True):
        lines = [line | {"time/collect": 1e20} for line in map(json.loads, metrics_of(run).read_text().splitlines())]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        metrics_of(run).write_text(text.replace('"train/loss": ', f'"train/loss": {sign}1.797e308, "x": ', 1))
    config = runs[0] / "configs" / "resolved.json"
    config.write_text(config.read_text().replace('"gamma": 0.99', '"gamma": 1e999'))
    page = report(*runs)
    for curve in page.curves["train/loss"].values():
        assert [math.isnan(y) for y in values(curve["data-y"])] == [True, *[False] * (UPDATES - 1)]
    assert page.text.count("train/loss was not finite in 1 of the lines") == 3


def test_the_gait_of_legs_is_drawn_from_the_evaluations_card(run: Path, tmp_path: Path) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    summary = dict.fromkeys(COLUMNS, 0.25) | {"torque": 3.0, "asymmetry": None}
    card: dict[str, Any] = {"feet": ["<FR>_calf", "FL_calf"], "control_period": 0.02, "summary": summary}
    card |= {"commands": [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], "contacts": {"fast": ["0110111", "0000000"]}}
    card |= {"columns": {"velocity_error": [0.25, None], "yaw_error": [2.0, 0.125]}}
    facts = {"checkpoint": "a_step_1", "episodes": 2, "gait": card}
    (run / "evaluations" / "a.json").write_text(json.dumps(facts))
    page, html = report(run), (run.parent / "page.html").read_text()
    assert page.rows["gait"][1][0] == "one" and page.data["gait"][1] == [0.25] * 3 + [0.25] * 3 + [3.0] + [0.25] * 2
    assert "<FR>" in page.text and "<FR>" not in html  # a foot's name is text
    bars = [(x, width) for x, width in re.findall(r'fill c0" x="([\d.]+)" y="0" width="([\d.]+)"', html)]
    sizes = [(float(x) - 60, float(width)) for x, width in bars]
    step = sizes[0][1] / 2
    np.testing.assert_allclose(sizes, [(step, 2 * step), (4 * step, 3 * step)], atol=0.1)
    # half of the full colour, all of it, and all of it where there is no number
    assert re.findall(r'fill c1" [^>]*opacity="([\d.]+)"', html) == ["0.49", "0.90", "0.90", "0.28"]
    (run / "evaluations" / "a.json").write_text(json.dumps(facts | {"gait": card | {"feet": [1]}}))
    assert "wrong 'gait.feet.0'" in report(run).text


@cases("linked", "evaluations", "checkpoints", "logs", "exported", "quarantine", "videos", "videos/a.mp4")
def test_a_link_out_of_the_run_is_told_and_not_followed(linked: str, run: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(run, foreign)
    for folder in ("evaluations", "exported", "quarantine", "videos"):
        (foreign / folder).mkdir()
    secret = {"checkpoint": "theirs", "global_step": 9, "episodes": 9, "rows": {"a": 1}, "versions": {"theirs": "1"}}
    secret |= {"artefacts": {"theirs": {}}, "schema_version": 2}
    for file in ("evaluations/a.json", "exported/parity.json", "quarantine/a.npz", "videos/a.mp4"):
        (foreign / file).write_text(json.dumps(secret))
    metrics_of(foreign).write_text(metrics_of(foreign).read_text().replace("train/", "theirs/"))
    (meta,) = foreign.glob("checkpoints/*/meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"versions": {"theirs": "1"}}))
    if (run / linked).exists():
        shutil.rmtree(run / linked)
    (run / linked).parent.mkdir(exist_ok=True)
    (run / linked).symlink_to(foreign / linked)
    page = report(run)
    assert "leads out of the run's folder, and is not followed" in page.text and "theirs" not in page.text
    assert page.data["runs"][1][-1] == 0 and "video" not in page.tags


def test_a_member_or_a_config_that_is_a_link_is_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    population, thief = (shutil.copytree(run, tmp_path / name) for name in ("population", "thief"))
    (population / "members").mkdir()
    (population / "members" / "0").symlink_to(run)
    shutil.rmtree(thief / "configs")
    (thief / "configs").symlink_to(run / "configs")
    assert main([str(run), str(population), str(thief), "--to", str(tmp_path / "page.html")]) == 1
    assert capsys.readouterr().err.count("leads out of the") == 2
    assert len(Page((tmp_path / "page.html").read_text()).rows["runs"]) == 2


def test_a_pipe_in_place_of_exploits_and_a_count_that_is_text_are_told(run: Path, tmp_path: Path) -> None:
    population = shutil.copytree(run, tmp_path / "population")
    member = shutil.copytree(run, population / "members" / "0")
    os.mkfifo(population / "exploits.jsonl")
    (meta,) = member.glob("checkpoints/*/meta.json")
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"skipped_updates": "1"}))
    page = report(population)
    assert "exploits.jsonl" in page.text and "is a named pipe, not a regular file" in page.text
    assert "meta.json has a wrong 'skipped_updates'" in page.text


def test_a_video_that_cannot_be_read_and_a_member_with_an_odd_name_end_no_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> bytes:
        raise PermissionError(13, "Permission denied", str(args[0]))

    member = shutil.copytree(run, tmp_path / "members" / "²")
    (member / "videos").mkdir()
    (member / "videos" / "ep1.mp4").write_bytes(b"film")
    monkeypatch.setattr("ejax.report.page.read_bytes", refuse)
    (tmp_path / "exploits.jsonl").write_text('{"step": 1, "update": 1, "member": 0, "parent": 1, "values": {}}\n')
    page = report(run, member)
    assert "not embedded: Permission denied" in page.text and "video" not in page.tags


def test_names_that_are_not_utf8_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    run = make_run(folder / os.fsdecode(b"run\xfe"))
    (run / "videos").mkdir()
    (run / "videos" / os.fsdecode(b"\xfd.mp4")).write_bytes(b"film")
    monkeypatch.setattr("ejax.report.page._LARGEST_VIDEO", 1)
    to = folder / os.fsdecode(b"\xfc.html")
    assert main([str(run), "--to", str(to)]) == 0
    page = Page(to.read_text())
    assert [value for _, name, value in page.attributes if name == "href"] == ["run%FE/videos/%FD.mp4"]
    assert r"run\udcfe" in page.text


@pytest.mark.parametrize("config", [{}, {"trainer": {}}, {"trainer": {"num_envs": 0}}])
def test_a_meta_without_a_config_to_read_is_not_followed(run: Path, config: dict[str, Any]) -> None:
    (file,) = run.glob("checkpoints/*/meta.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"config": config, "global_step": 0}))
    page = report(run)
    assert "finished" in page.rows["runs"][1]
    assert ("the config in the newest checkpoint's meta.json lacks the key" in page.text) == (config != {})


def test_names_from_files_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b onclick=x>'\"&")
    file = metrics_of(run)
    file.write_text(file.read_text().replace("rewards/near", "rewards/<img src=x>'\\\"--></script>"))
    page = report(run)
    assert not page.tags & {"b", "img"} - {"b"} and page.text.count("<b onclick=x>'\"&") > 1
    assert "rewards/<img src=x>'\"--></script>" in page.curves
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_the_page_loads_nothing_and_allows_its_own_script_only(run: Path) -> None:
    page = report(run)
    html = (run.parent / "page.html").read_text()
    report(run)
    assert (run.parent / "page.html").read_text() == html  # the same input gives the same page
    (script,) = re.findall("<script>(.*?)</script>", html, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy
    assert (
        not [value for _, name, value in page.attributes if name in ("src", "href")]
        and "http:" not in html
        and "https:" not in html
    )


def test_the_newest_video_is_embedded_if_it_is_small(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("new", "old")):
        video = run / "videos" / "eval" / f"{name}.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        video.write_bytes(name.encode() * 10)
        os.utime(video, (START - age, START - age))
    (source,) = (value for tag, name, value in report(run).attributes if (tag, name) == ("video", "src"))
    assert base64.b64decode(source.partition(",")[2]) == b"new" * 10
    monkeypatch.setattr("ejax.report.page._LARGEST_VIDEO", 20)
    (link,) = (value for _, name, value in report(run).attributes if name == "href")
    assert link == "one/videos/eval/new.mp4"


def test_an_export_is_a_table(run: Path, tmp_path: Path) -> None:
    parity = {
        "checkpoint": "tiny_step_96",
        "global_step": 96,
        "rows": {"edges": 3, "zeros": 1},
        "versions": {"jax": "1"},
    }
    errors = {"file": "policy.pt", "max_abs": 1.5e-6, "max_rel": 0.25, "of_allowed": 0.5}
    for folder in (run / "exported", tmp_path / "elsewhere"):
        folder.mkdir()
        (folder / "parity.json").write_text(json.dumps(parity | {"artefacts": {"pt": errors}}))
    page = report(run, options=("--parity", str(tmp_path / "elsewhere")))
    assert page.data["exports"][1:] == [[96, 4, 1.5e-6, 0.25, 0.5]] * 2


def write_fresh(run: Path, which: str, step: int, value: float) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    facts = {"checkpoint": "c", "step": step, "episodes": 50, "seeds": [7], "eval/success_rate": value}
    (run / "evaluations" / f"fresh_{which}.json").write_text(json.dumps(facts))


def test_fresh_episodes_stand_beside_the_best_and_order_the_sweep(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(i), seed=i, **with_rate(i * 1e-3)) for i in (1, 2, 3)]
    successes = [logged(run, "eval/success_rate") for run in runs]
    for success, run, value in zip(successes, runs, (0.25, 0.5, 0.125), strict=True):
        write_fresh(run, "best", max(success, key=success.__getitem__), value)
        write_fresh(run, "last", UPDATES * STEPS, 0.0625)
    page = report(*runs)
    assert [row[-6:-2] for row in page.data["runs"][1:]] == [[x, 50, 0.0625, 50] for x in (0.25, 0.5, 0.125)]
    assert [row[0] for row in page.data["sweep"][1:]] == [0.5, 0.25, 0.125]
    write_fresh(runs[0], "best", 1, 1.0)  # of a checkpoint that is not the best any more
    page = report(*runs)
    assert 1.0 not in page.data["runs"][1] and page.data["sweep"][1][0] == max(max(x.values()) for x in successes)


def test_other_instructions_in_the_same_pictures_are_drawn_below_their_starts(run: Path) -> None:
    picture = base64.b64encode(b"png").decode()
    shown = {"sentences": ["go <left>", "go right"], "starts": [picture] * 2, "ends": [[picture] * 2] * 2}
    shown["outcomes"] = [["red cube: left zone", "nothing lifted"], ["red cube: right zone"] * 2]
    facts = {"checkpoint": "a_step_1", "episodes": 4, "counterfactual": shown}
    (run / "evaluations").mkdir(exist_ok=True)
    (run / "evaluations" / "a_counterfactual.json").write_text(json.dumps(facts))
    page = report(run)
    assert page.rows["counterfactual"][1:] == [
        ["", "at the start", "at the start"],
        ["go <left>", "red cube: left zone", "nothing lifted"],
        ["go right", "red cube: right zone", "red cube: right zone"],
    ]
    (run / "evaluations" / "a_counterfactual.json").write_text(
        json.dumps(facts | {"counterfactual": shown | {"starts": ["no base64!"]}})
    )
    assert "counterfactual.starts" in report(run).text


def test_evaluations_of_checkpoints_and_quarantined_episodes_are_shown(run: Path) -> None:
    (run / "quarantine").mkdir()
    (run / "quarantine" / "step1_row0.npz").touch()
    (run / "evaluations").mkdir()
    facts = {
        "checkpoint": "/somewhere/tiny_step_96",
        "episodes": 7,
        "seed": 3,
        "eval/avg_reward": 0.125,
        "eval/x": True,
    }
    (run / "evaluations" / "tiny_step_96.json").write_text(json.dumps(facts))
    page = report(run)
    assert page.data["evaluations"][1:] == [[7, 0.125]] and page.data["runs"][1][-1] == 1


@cases(
    "arguments text",
    (("{run}", "{run}"), "is given twice; name each run once"),
    (("{run}/logs",), "is not a run of ejax: it has no configs/resolved.json"),
    (("{run}", "--to", "page.txt"), "pass --to FILE.html"),
    (("{run}", "--to", "{run}/no/page.html"), "No such file or directory"),
    (("{run}", "--parity", "{run}"), "is not an export: it has no parity.json"),
)
def test_bad_input_is_an_error_that_says_so(
    arguments: tuple[str, ...], text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([each.format(run=run) for each in arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_config_that_cannot_be_read_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "configs" / "resolved.json").write_text('{"trainer": {}}')
    assert main([str(run), "--to", str(run / "page.html")]) == 2
    assert "resolved.json lacks the key 'trainer.exp_name'" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_is_left_out_of_the_others_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, bad = report(run), make_run(tmp_path / "bad")
    (bad / "configs" / "resolved.json").write_text("[" * 100_000)
    to = tmp_path / "page.html"
    assert main([str(bad), str(run), str(tmp_path / "none"), "--to", str(to)]) == 1
    page, lines = Page(to.read_text()), capsys.readouterr().err.splitlines()
    assert (page.rows, page.data, page.curves) == (alone.rows, alone.data, alone.curves)
    for line, reason in zip(lines, ("no run of 'none'", "nested deeper than"), strict=True):
        assert reason in line and line.removeprefix("ejax report: ") in page.text
    to.unlink()
    assert main([str(bad), str(tmp_path / "none"), "--to", str(to)]) == 2
    assert not to.exists() and capsys.readouterr().err.count("left out: ") == 2


@pytest.mark.slow
def test_a_training_is_reported_as_it_ended(tmp_path: Path) -> None:
    result = train(parse_config(tiny(tmp_path, **EVALUATED)))
    page = report(result.run_dir)
    assert "finished" in page.rows["runs"][1] and "Log problems" not in page.text
    curve = page.curves["eval/avg_reward"][result.run_dir.name]
    expected = [each["eval/avg_reward"] for each in result.eval_history]
    np.testing.assert_allclose(values(curve["data-y"]), expected, rtol=1e-6)


def test_a_run_that_a_resume_lengthened_is_as_long_as_it_says_now(tmp_path: Path) -> None:
    run = train(parse_config(tiny(tmp_path))).run_dir
    longer = parse_config(tiny(tmp_path, iterations=3))
    train(longer, resume="latest", run_dir=run)
    told = f"2 updates until step {2 * STEPS}, then 3"
    assert f"finished{told}" in report(run).rows["runs"][1]
    shutil.rmtree(run / "checkpoints" / f"tiny_step_{3 * STEPS}")  # as of a resume that was killed before its first
    read = Run(run)
    assert read.lengths == told and read.updates == (3, 3)
    assert read.state == "not finished: no checkpoint is of its last update, 3"
    again = train(parse_config(tiny(tmp_path, iterations=3, exp_name="again"))).run_dir
    assert not [row for row in report(run, again).rows["differences"][1:] if "iterations" in row[0]]


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs the browser chromium")
def test_a_browser_shows_the_values_under_the_pointer(run: Path, tmp_path: Path) -> None:
    report(run)
    point = """<script>
      const chart = document.querySelector('svg.curves'), box = chart.getBoundingClientRect();
      chart.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 5, clientY: box.top + 5}));
    </script>"""
    html = (run.parent / "page.html").read_text()
    html = re.sub("<meta http-equiv=[^>]*>", "", html)  # which forbids a second script
    (tmp_path / "pointed.html").write_text(html.replace("</body>", f"{point}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        ["chromium", *options, profile, f"file://{tmp_path}/pointed.html"], capture_output=True, text=True, timeout=60
    ).stdout
    tip = re.sub("<[^>]*>", " ", shown[shown.index('id="tip"') :].partition("<script")[0])
    last = logged(run, "eval/success_rate")[UPDATES * STEPS]
    assert f"{UPDATES * STEPS} env steps" in tip and f"one: {last:.6g}" in tip
