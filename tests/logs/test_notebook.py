"""Runs in a notebook: what is shown, and what the kernel's interrupt does."""

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny

from ejax.config import parse_config
from ejax.logs.best import Best
from ejax.logs.console import Latest, NotebookView, in_notebook
from ejax.run import train

ROOT = Path(__file__).parents[2]
WITHOUT_A_KERNEL = importlib.util.find_spec("ipykernel") is None


class Cell:
    """A cell's output, and a clock that stands still."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.now = 0.0

    def show(self, html: str) -> Any:
        self.shown.append(html)
        return self.shown.append


def view_in(cell: Cell) -> NotebookView:
    return NotebookView(Latest("probe", total_steps=100), show=cell.show, clock=lambda: cell.now)


def test_a_notebook_shows_progress_values_and_a_curve() -> None:
    cell = Cell()
    view = view_in(cell)
    assert "waiting for the first update" in cell.shown[0]
    for step in (25, 50):
        view.write(step, {"charts/episode_reward_avg_100": 0.1 * step, "train/loss": 0.5}, None)
    view.write(50, {"eval/avg_reward": 3.25}, Best(value=4.5, step=25))
    view.close()
    last = cell.shown[-1]
    text = re.sub(r"\s+", " ", re.sub("<[^>]*>", "", last))
    for shown in ("50/100", "loss 0.5", "avg_reward 3.25", "4.5 at step 25"):
        assert shown in text
    assert 'data-x="25 50" data-y="2.5 5"' in last and 'data-x="50" data-y="3.25"' in last


def test_a_notebook_is_redrawn_at_a_bounded_rate() -> None:
    cell = Cell()
    view = view_in(cell)
    for step in range(1, 10):
        cell.now += 0.1
        view.write(step, {"train/loss": 0.0}, None)
    assert len(cell.shown) == 2  # the first one, and one after half a second


def test_of_the_notes_the_last_few_stay_and_are_no_html() -> None:
    cell = Cell()
    view = view_in(cell)
    for i in range(9):
        view.note(f"<b>{i}")
    assert "… 3 more before\n&lt;b&gt;3\n" in cell.shown[-1]


def test_a_process_without_a_kernel_is_no_notebook() -> None:
    assert not in_notebook()


@pytest.mark.slow
def test_a_result_shows_its_curves_and_facts(tmp_path: Path) -> None:
    result = train(parse_config(tiny(tmp_path, iterations=6)))
    html = result._repr_html_()
    assert html.count("<svg class=") == 1 and "training, mean of 100 episodes" in html
    text = re.sub(r"<[^>]*>|\s", "", html)  # a long path is wrapped
    assert str(result.run_dir) in text and "192,in6updates" in text


@pytest.mark.slow
@pytest.mark.skipif(WITHOUT_A_KERNEL, reason="needs the extra docs")
def test_a_kernels_interrupt_saves_and_the_next_cell_goes_on(tmp_path: Path) -> None:
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    manager._kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "PYTHONPATH": path})
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        config = json.dumps({**tiny(tmp_path), "trainer": {**tiny(tmp_path)["trainer"], "console": True}})
        kernel = Kernel(manager, client)
        kernel.run(
            f"import json\nfrom ejax.config import parse_config\nfrom ejax.run import train\nc = json.loads('{config}')"
        )
        shown = kernel.run("r = train(parse_config(c, ['trainer.iterations=1000000']))", interrupt_at="steps/s")
        assert "steps/s" in shown[-1]
        said = kernel.run("print(r.finished, r.num_updates > 0)\nr")
        assert "False True" in said[0] and "finished" in said[1]
        total = "trainer.iterations={r.num_updates + 4}"
        assert "True" in kernel.run(f"r = train(parse_config(c, [f'{total}']), resume='latest')\nprint(r.finished)")[-1]
        again = kernel.run("print(train(parse_config(c)).num_updates)")  # the cell once more: another run
        assert again[-1].strip() == "2"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Kernel:
    """Runs cells, one after the other."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(self, code: str, *, interrupt_at: str | None = None) -> list[str]:
        """Return the output of a cell: text, or HTML if it has some.

        Args:
            interrupt_at: press the stop button as soon as this is shown.
        """
        message, shown, deadline = self.client.execute(code), [], time.monotonic() + 120.0
        while time.monotonic() < deadline:
            said = self.client.get_iopub_msg(timeout=120)
            content = said["content"]
            if said["parent_header"].get("msg_id") != message:
                continue
            if said["msg_type"] == "error":
                raise AssertionError("\n".join(content["traceback"]))
            if said["msg_type"] == "stream" and content["name"] == "stdout":
                shown.append(content["text"])
            if "data" in content:
                shown.append(content["data"].get("text/html", content["data"]["text/plain"]))
                if interrupt_at is not None and interrupt_at in shown[-1]:
                    self.manager.interrupt_kernel()
                    interrupt_at = None
            if said["msg_type"] == "status" and content["execution_state"] == "idle":
                return shown
        raise AssertionError(f"not done: {code}")
