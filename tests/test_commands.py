"""``ejax COMMAND``: one name for the command lines, and what their start must not import."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from case_tables import cases
from helpers.tiny import STEPS, tiny

from ejax import __version__, train
from ejax.__main__ import COMMANDS, main


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"embodichain", "export", "verify"}))
def test_each_command_is_the_module_that_python_runs(name: str) -> None:
    program = "import sys; from ejax.__main__ import main; main(sys.argv[1:])"
    result = python(program, name, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no command 'trian'" in (text := capsys.readouterr().err) and "Did you mean 'train'?" in text


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"ejax {__version__}\n"


WINGS = {
    "data": ("ejax.data.engine", "ejax.data.task"),
    "lerobot": ("ejax.data.lerobot", "pyarrow", "imageio_ffmpeg"),
    "vla": ("ejax.policies.vla.network", "ejax.policies.pretrained", "safetensors"),
    "report": ("ejax.report", "matplotlib"),
    "preflight": ("ejax.preflight",),
    "population": ("ejax.population",),
    "play": ("ejax.play", "mujoco"),
    "interop": ("interop", "tensordict", "onnxruntime"),  # tensorboardX looks for torch itself
}


@pytest.fixture(scope="module")
def modules_of_a_training() -> set[str]:
    """Modules that a whole run of PPO imports, from its config to its last checkpoint."""
    code = "import sys; from ejax.train import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    config = str(Path(__file__).parents[1] / "configs" / "point_mass" / "ppo.yaml")
    with tempfile.TemporaryDirectory() as folder:
        small = ("trainer.iterations=1", "trainer.num_envs=4", "trainer.buffer_size=4", "trainer.enable_eval=false")
        words = ("--config", config, f"trainer.output_dir={folder}", "algorithm.cfg.batch_size=16", *small)
        result = python(code, *words)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_is_imported_by_those_that_use_it_alone(wing: str, modules_of_a_training: set[str]) -> None:
    assert "ejax.algorithms.ppo" in modules_of_a_training
    roots = tuple(f"{root}." for root in WINGS[wing])
    found = [name for name in modules_of_a_training if f"{name}.".startswith(roots)]
    assert not found, "a plain training needs none of it"


@cases(
    "module heavy",
    ("ejax", {"jax", "numpy"}),
    ("ejax.train", {"jax", "pydantic", "rich"}),
    ("ejax.evaluate", {"jax", "pydantic", "rich"}),
    ("ejax.play.__main__", {"jax", "pydantic", "rich"}),
    ("ejax.report.__main__", {"jax", "numpy", "pydantic"}),
    ("ejax.config", {"mujoco", "orbax"}),
    ("ejax.run", {"mujoco", "orbax", "tensorstore", "pyarrow", "torch"}),
    ("interop.serving.server", {"jax", "torch"}),
)
def test_what_takes_long_to_import_is_imported_where_it_is_used(module: str, heavy: set[str]) -> None:
    result = python(f"import sys, {module}; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    assert not heavy & set(result.stdout.split())


def test_a_folder_of_the_same_name_where_one_works_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "ejax").mkdir()  # such as the clone itself, seen from the folder that it lies in
    program = "import ejax, interop; print(ejax.__version__, ejax.gae, interop.__doc__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(__version__), done.stderr


def run_script(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script ``ejax``, which lies in another folder, with ``folder`` as working directory."""
    script = folder / "bin" / "ejax"
    script.parent.mkdir(exist_ok=True)
    script.write_text("import sys; from ejax.__main__ import main; sys.exit(main())")
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(script), *words]
    env = {**os.environ, **paths, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_script_finds_a_trusted_module_of_the_working_directory_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("from ejax.envs.tasks.point_mass import PointMassRL as Mine")
    (tmp_path / "envpool.py").write_text("open('ran', 'w')")
    config = str(Path(__file__).parents[1] / "configs" / "point_mass" / "ppo.yaml")
    override = "trainer.learning_env={name: 'my_task:Mine'}"
    found = run_script(tmp_path, "config", "check", config, override)
    assert "0 unsupported" in found.stdout and found.returncode == 0, found.stdout + found.stderr
    without = run_script(tmp_path, "config", "check", config, override, PYTHONSAFEPATH="1")
    assert without.returncode == 2 and "No module named 'my_task'" in without.stdout
    train = run_script(tmp_path, "train", "--config", config, "env=envpool:Pong-v5")
    assert train.returncode == 2 and "is not installed" in train.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_verbose_run_lists_what_is_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(tiny(tmp_path)))
    assert train.main(["--config", str(file), "-v", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "[config] policy: actor_critic (registered: actor_critic, actor_only," in out
    assert "[config] algorithm: ppo (registered: apg, bc," in out and "[config] env: PointMassRL (registered: " in out
    assert f"[config] {2 * STEPS} env steps in 2 updates" in out
