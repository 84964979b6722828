"""Command lines and files that mean nothing: each is refused in one line, with exit code 2."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases
from commands import command_main
from tiny import tiny

from ejax.__main__ import COMMANDS
from ejax.config import parse_config
from ejax.play.replay import main as replay
from ejax.run import train

BIG = "99999999999999999999"
FACTS: dict[str, Any] = {
    "recipe": {"id": "gymnasium:CartPole-v1", "cfg": {}},
    "seed": 1,
    "seeded": True,
    "complete": True,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(parse_config(tiny(tmp_path_factory.mktemp("odd"))), run_dir=None).run_dir


def refused(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """Return the line by which a command refuses its arguments."""
    try:
        code = command_main(COMMANDS[command][0])(list(words))
    except SystemExit as exit:  # argparse's
        code = exit.code
    told = capsys.readouterr().err
    assert code == 2 and "Traceback" not in told
    return told.splitlines()[-1]


@pytest.mark.slow
@cases(
    "words text",
    (["--device", "cuda:9"], "got 'cuda:9', but the devices of jax here are"),
    (["--device", "tpu:9"], "got 'tpu:9'"),
    (["--device", "cpu:9999"], "got 'cpu:9999'"),
    (["--device", "nonsense"], "use cpu, or install jax"),
    (["--episodes", BIG], "pass a whole number from 1 to"),
    (["--episodes", "0"], "pass a whole number from 1 to"),
    (["--seed", BIG], "pass a whole number from 0 to"),
    (["--seed", "-1"], "pass a whole number from 0 to"),
    (["--member", "-1"], "pass a whole number from 0 to"),
)
@pytest.mark.parametrize("command", ["evaluate", "play"])
def test_options_that_mean_nothing_are_refused(
    command: str, words: list[str], text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = ["--video", str(run / "a.mp4")]
    assert text in refused(capsys, command, str(run), *video, *words)


@pytest.mark.parametrize("command", ["evaluate", "play"])
def test_keys_may_follow_options(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "env.cfg.oops" in refused(capsys, command, str(run), "--episodes", "2", "env.cfg.oops=1")


@cases(
    "command words",
    ("train", ["--config", "a", "--config", "b"]),
    ("train", ["--resume", "latest", "trainer.seed=1", "--resume", "best"]),
    ("train", ["--distributed", "--no-distributed"]),
    ("evaluate", ["run", "--seed", "0", "--seed=0"]),
    ("play", ["run", "--video", "a.mp4", "--vid", "b.mp4"]),
    ("export", ["run", "--to", "a", "--to", "b"]),
    ("serve", ["run", "--port", "1", "--port", "2"]),
)
def test_an_option_given_twice_is_refused(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "given twice; pass it once" in refused(capsys, command, *words)


@cases(
    "command words",
    ("evaluate", ["run", "--video", "FILE/a.mp4"]),
    ("evaluate", ["run", "--json", "FILE/b/a.json"]),
    ("play", ["run", "--video", "FILE/a.mp4"]),
    ("report", ["run", "--to", "FILE/a.html"]),
    ("export", ["run", "--to", "FILE"]),
    ("train", ["--config", "push_cube/ppo", "--run", "FILE"]),
    ("record", ["--task", "PushCube", "--episodes", "1", "--to", "FILE/b"]),
    ("configs", ["copy", "push_cube/ppo", "FILE/a.yaml"]),
    ("embodichain", ["to-pt", "run", "--out", "FILE/a.pt"]),
)
def test_what_would_be_written_below_a_file_is_refused_by_option(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").write_text("")
    message = refused(capsys, command, *(word.replace("FILE", str(file)) for word in words))
    option = words[-2] if words[-2].startswith("-") else "to"
    assert f"argument {option}: {file} is a file, where a folder must be; name another place" in message


@pytest.mark.parametrize("name", ["", "below"])
def test_an_output_dir_that_is_a_file_is_refused_by_its_key(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "tiny.json").write_text(json.dumps(tiny(config / name)))
    message = refused(capsys, "train", "--config", str(config))
    assert "trainer.output_dir: got" in message and "name another folder" in message


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
@pytest.mark.parametrize("command", ["evaluate", "play", "report", "replay", "train"])
def test_a_name_that_no_folder_has_is_refused(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--run", name, "--resume", "latest"] if command == "train" else [name]
    assert refused(capsys, command, *words).startswith(f"ejax {command}: ")


def test_a_new_run_under_a_name_that_no_folder_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(tiny(tmp_path)))
    assert "null character" in refused(capsys, "train", "--config", str(file), "--run", "a\0b")


@cases(
    "facts actions",
    ({"recipe": 5}, [0]),
    ({"recipe": {"id": "gymnasium:CartPole-v1"}}, [0]),
    ({"recipe": {"id": "gymnasium:CartPole-v1", "cfg": {"x": 1}}}, [0]),
    ({"seed": -1}, [0]),
    ({"seed": 2**64}, [0]),
    ({"seeded": None}, [0]),
    ({}, [[0, 1]]),
    ({}, ["a"]),
)
def test_a_quarantined_episode_of_another_form_is_refused(
    facts: dict[str, Any], actions: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "a.npz", facts=json.dumps(FACTS | facts), actions=np.array(actions))
    assert replay([str(tmp_path / "a.npz")]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"\x93NUMPY", b"text"])
def test_what_is_no_archive_is_no_quarantined_episode(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    assert "not a file of ejax's quarantine" in refused(capsys, "replay", str(tmp_path / "a.npz"))
    assert "is not a file" in refused(capsys, "replay", "/dev/null")
