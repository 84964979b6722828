"""A run with its own code, opened from another folder: the code is imported from where it lies, or nothing is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax.config import parse_config
from ejax.envs.manager.manager_spec import read_manager_spec
from ejax.schema import trust
from ejax.schema.code_places import main_module, note_code
from ejax.schema.registry import resolve
from ejax.schema.trust import trust_words
from ejax.store.run_dir import create_run_directory, open_run_directory

pytestmark = pytest.mark.usefixtures("nothing_trusted")
TASK = """
from ejax.algorithms.ppo import ALGORITHM as algorithm
from ejax.envs.tasks.cart_pole import CartPoleRL as Cart
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies.actor_critic import ActorCritic as Policy
{}
class Env(PointMassRL):
    where = {!r}
import jax.numpy as jnp
def functor(world, *args, **params): return jnp.zeros(())
"""
PLAIN = {"env": {"id": "PointMassRL"}}
PUSH_CUBE = json.loads((Path(__file__).parents[1] / "gym_configs" / "push_cube.json").read_text())
PUSH_CUBE["env"]["rewards"]["own"] = {"func": "lift_task:functor", "mode": "add"}
PLACES = {"lift_task": "lift_task.py", "lift_pkg.tasks": "lift_pkg/tasks.py", "lift_space.task": "lift_space/task.py"}


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in an empty folder, as a process that has imported nothing of a user's."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    another_process(monkeypatch, folder)
    yield folder
    another_process(monkeypatch, folder)


def another_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if entry and "pytest-of" not in entry)])
    monkeypatch.setattr(trust, "_named", set())
    monkeypatch.setattr(trust, "_noticed", set())
    monkeypatch.delenv("PYTHONPATH", raising=False)
    read_manager_spec.cache_clear()
    for name in [name for name in sys.modules if name.startswith("lift_")]:
        del sys.modules[name]


def project(folder: Path, extra: str = "") -> Path:
    for file in PLACES.values():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(TASK.format(extra, folder.name))
    (folder / "lift_pkg" / "__init__.py").touch()
    return folder


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str = "lift_task", **sections: Any) -> Path:
    """Make a run by a program that stands in ``folder``, and forget it."""
    here = Path.cwd()
    another_process(monkeypatch, folder)
    config = parse_config({**tiny(), "env": {"id": f"{module}:Env"}, **sections})
    run = create_run_directory(config, folder / f"run_{module}").path
    another_process(monkeypatch, here)
    return run


def where(run: Path, module: str = "lift_task") -> str:
    """Open a run, and name the project that its environment is of."""
    return str(resolve("env", open_run_directory(run)[1].env.id).where)


@pytest.mark.parametrize("module", PLACES)
def test_what_is_trusted_is_imported_from_where_it_lies(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = project(tmp_path / "own")
    run = made(own, monkeypatch, module)
    refused(open_run_directory, run, match=f"trained with {own / PLACES[module]}")
    trust_words([f"{module}:Env"])
    assert where(run, module) == "own"
    assert f"'{module}:Env' is taken from {own / PLACES[module]}" in capsys.readouterr().err


@cases(
    "section name",
    ({"env": {"id": "lift_task:Cart", "wrappers": ["RenderedEnv"]}}, "Cart"),
    ({"env": {"id": "EmbodiedEnv", "cfg": {"gym_config": PUSH_CUBE}}}, "functor"),
    ({**PLAIN, "policy": {"name": "lift_task:Policy"}}, "Policy"),
    ({**PLAIN, "algorithm": {"name": "lift_task:algorithm", "cfg": {"batch_size": 16}}}, "algorithm"),
)
def test_whatever_a_run_names_is_found(
    section: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = project(tmp_path / "own")
    run = made(own, monkeypatch, **section)
    refused(open_run_directory, run, match=f"trained with {own}/lift_task.py")
    trust_words([f"lift_task:{name}"])
    open_run_directory(run)
    assert trust.import_trusted(f"lift_task:{name}").__file__ == str(own / "lift_task.py")


def test_another_module_of_the_name_is_not_taken_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = project(tmp_path / "own")
    run, here = made(own, monkeypatch), project(other_folder)
    trust_words(["lift_task:Env"])
    refused(open_run_directory, run, match=f"is {here}/lift_task.py here, .* with {own}/lift_task.py; .*in PYTHONPATH")
    for folder, taken in ((own, "own"), (here, "elsewhere")):
        another_process(monkeypatch, other_folder)
        trust_words(["lift_task:Env"])
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        assert where(run) == taken
    assert f"with {own}/lift_task.py, from which {here}/lift_task.py differs" in capsys.readouterr().err


def test_a_folder_of_the_name_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_folder: Path
) -> None:
    run = made(project(tmp_path / "own"), monkeypatch)
    (other_folder / "lift_task").mkdir()
    trust_words(["lift_task:Env"])
    assert where(run) == "own"


def test_two_runs_with_functors_of_one_name_do_not_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"env": {"id": "EmbodiedEnv", "cfg": {"gym_config": PUSH_CUBE}}}
    first, second = (made(project(tmp_path / name), monkeypatch, **section) for name in ("first", "second"))
    trust_words(["lift_task:functor"])
    open_run_directory(first)
    refused(open_run_directory, second, match=r"first/lift_task\.py here, .*second/lift_task\.py")


def test_changed_and_moved_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = project(tmp_path / "own")
    run = made(own, monkeypatch)
    trust_words(["lift_task:Env"])
    assert where(run) == "own" and "has changed" not in capsys.readouterr().err
    another_process(monkeypatch, own)
    trust_words(["lift_task:Env"])
    project(own, extra="changed = True")
    assert where(run) == "own" and f"{own}/lift_task.py has changed since" in capsys.readouterr().err
    moved = own.rename(tmp_path / "moved")
    another_process(monkeypatch, other_folder)
    trust_words(["lift_task:Env"])
    refused(open_run_directory, moved / run.name, match=f"trained with {own}/lift_task.py; start in the folder")
    another_process(monkeypatch, moved)
    trust_words(["lift_task:Env"])
    assert where(moved / run.name) == "own" and "from which" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["{run}/lift_task.py", "{run}/code/lift_task.py"])
def test_the_place_that_a_strangers_run_notes_is_trusted_by_nobody(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    run = made(project(own), monkeypatch)
    (own / "lift_task.py").unlink()
    noted = Path(file.format(run=run))
    noted.parent.mkdir(exist_ok=True)
    noted.write_text("raise AssertionError('a stranger ran')")
    note(run, {"lift_task": f"0 {noted}"})
    refused(open_run_directory, run, match="may not start")
    trust_words(["lift_task:Env"])
    refused(open_run_directory, run, match="cannot be imported")


def note(run: Path, code: object) -> None:
    """Write what a run notes of its code."""
    versions = run / "configs" / "versions.json"
    versions.write_text(json.dumps(json.loads(versions.read_text()) | {"code": code}))
    (run / "configs" / "SHA256").unlink()


@pytest.mark.parametrize("code", [None, [], {"lift_task": 3}, {"lift_task": ""}, {"lift_task": "0 lift_task.py"}])
def test_a_damaged_note_finds_nothing(code: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(project(tmp_path / "own"), monkeypatch)
    note(run, code)
    trust_words(["lift_task:Env"])
    refused(open_run_directory, run, match="start in the folder that it lies in")


def test_what_is_installed_is_not_noted(tmp_path: Path) -> None:
    tree = [{"func": "json:loads"}, "numpy:array", "ejax.envs.tasks.point_mass:PointMassRL", "no_such_module:Env"]
    assert note_code(trust.places_in(tree)) == {}


def test_the_module_that_was_started_has_the_name_that_others_import_it_by(monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.__spec__ = None
    assert main_module() == "__main__"  # a notebook
    main.__file__ = "/somewhere/lift_script.py"
    assert main_module("other") == "__main__" and main_module() == "lift_script"
    assert sys.modules["lift_script"] is main
    main.__file__ = "/somewhere/json.py"
    assert main_module() == "__main__"  # others would import the standard library's


def test_a_class_of_a_notebook_is_told_apart() -> None:
    refused(trust.check_trusted, "__main__:NoSuchClass", match="notebook", error=trust.UntrustedCodeError)


def test_a_program_names_its_own_module_as_others_import_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_folder: Path
) -> None:
    own = project(tmp_path / "own")
    monkeypatch.syspath_prepend(own)
    import lift_task

    monkeypatch.delitem(sys.modules, "lift_task")
    monkeypatch.setitem(sys.modules, "__main__", lift_task)
    lift_task.__spec__ = None  # type: ignore[assignment]
    config = parse_config({**tiny(), "env": {"id": "__main__:Env"}})
    assert config.env.id == "lift_task:Env" and resolve("env", config.env.id) is lift_task.Env


@pytest.mark.slow
def test_every_command_opens_a_run_of_a_script_from_another_folder(tmp_path: Path, other_folder: Path) -> None:
    own, root = project(tmp_path / "own"), Path(__file__).parents[2]
    lines = [
        "if __name__ == '__main__':",
        "    import sys; from pathlib import Path; sys.path.append('{helpers}')",
        "    from tiny import tiny; from ejax.config import parse_config; from ejax.run import train",
        "    tree = {**tiny(iterations=1, save_freq=8), 'env': {'id': '__main__:Env'}}",
        "    train(parse_config(tree), run_dir=Path('run'))",
    ]
    text = "\n".join(lines).replace("{helpers}", str(root / "tests" / "helpers"))
    (own / "lift_task.py").write_text(TASK.format("", "own") + text)
    environ = {**os.environ, "PYTHONPATH": str(root)}

    def run(*words: str, cwd: Path = other_folder) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True)

    assert (first := run("lift_task.py", cwd=own)).returncode == 0, first.stderr
    made, trusting = str(own / "run"), ["--trust", "lift_task:Env"]
    refused = run("-m", "ejax.evaluate", made, "--episodes", "2")
    assert refused.returncode == 2 and f"trained with {own}/lift_task.py" in refused.stderr
    loading = f"import ejax; from ejax.schema.trust import trust; trust('lift_task:Env'); print(ejax.load({made!r}))"
    for words in (
        ["-m", "ejax.evaluate", made, "--episodes", "2", "--num-envs", "2", *trusting],
        ["-c", loading],
        ["-m", "ejax.train", "--run", made, "--resume", "latest", "trainer.iterations=2", *trusting],
        ["-m", "ejax.train", "--fork", made, "--run", str(tmp_path / "fork"), "trainer.iterations=3", *trusting],
        ["-m", "interop.export", made, "--to", str(tmp_path / "export"), "--formats", "stablehlo", *trusting],
        ["-m", "ejax.report", made, "--to", str(tmp_path / "report.html")],
    ):
        done = run(*words)
        assert done.returncode == 0, (words, done.stderr[-2000:])
