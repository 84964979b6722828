"""The tutorials' code runs as it stands on the page; trainings are cut short."""

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from commands import command_main

from ejax.__main__ import COMMANDS
from ejax.envs.check import check_shapes
from ejax.envs.wrappers.placing import with_events

ROOT = Path(__file__).parents[1]
SHORT = (
    "trainer.total_timesteps=256",
    "trainer.num_envs=4",
    "trainer.enable_eval=false",
    "algorithm.cfg.batch_size=64",
)
"""Changes of a training's config, none of which the page is about."""


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/tutorials" / page).read_text(), re.MULTILINE | re.DOTALL)
    return [Block(*each) for each in found]


def run_line(line: str) -> None:
    """``ejax COMMAND …``, in this process."""
    ejax, command, *arguments = shlex.split(line, comments=True)
    assert ejax == "ejax"
    if command == "evaluate":
        arguments[arguments.index("--episodes") + 1] = "4"
    arguments += SHORT if command == "train" else ()
    code = command_main(COMMANDS[command][0])(arguments)
    assert code == 0, line


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flatbuffers") is None, reason="its export needs flatbuffers")
def test_a_task_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))
    shown, *rest = blocks("01_own_task.md")
    assert shown.text in (ROOT / "examples/own_mujoco_task.py").read_text()
    names: dict[str, object] = {"__name__": "page"}
    for block in rest:
        if block.language == "python":
            exec(compile(block.text, "page", "exec"), names)
        elif block.language == "bash":
            for line in block.text.splitlines():
                if line != "cd examples":
                    run_line(line)
    for name in ("DeskLamp", "Windy", "Gentle", "Worn"):
        task: Any = names[name]
        check_shapes(with_events(task(), {}))
    check_shapes(names["seen"])
    windy: Any = names["Windy"]
    np.testing.assert_allclose(windy().reset(jax.random.key(0))[1][-1], 0.35, atol=0.15)  # of 4.8 m in the MJCF
    assert "no site 'blub'; there is bulb. Did you mean 'bulb'?" in capsys.readouterr().out
    assert Path("play.mp4").is_file() and Path("policy/contract.json").is_file()
