"""Imports inside ejax go down the layers only."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    ["schema", "runtime", "types"],
    ["numerics", "distributions", "returns", "losses", "optim"],
    ["policies", "envs", "rollout", "episodes", "data"],
    ["evaluation", "algorithms", "collectors", "experts"],
    ["config"],
    ["logs", "store", "training"],
    ["run", "trainer", "learner", "population", "play", "report", "preflight"],
    ["train", "evaluate", "__main__"],
]
"""Folders and public modules: each imports from its own row and from those above it in this list. ``data`` has a
stricter rule, below; ``schema.registry`` names what is above it as text, and imports it when called."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ENV_LAYERS = [
    ["mujoco", "host"],
    ["task"],
    ["randomization"],
    ["terms"],
    ["tasks"],
    ["locomotion", "manager"],
    ["wrappers"],
    ["adapters"],
]
"""Folders of ``envs``, likewise: worlds, changes of their models, functions of worlds, then the tasks made of them."""
_ALONE = (
    "trust",
    "code_places",
    "plain_files",
    "writing",
    "tables",
    "messages",
    "configclass",
    "paths",
    "lazy_names",
    "command_line",
)
STANDARD = (
    *(f"ejax.schema.{name}" for name in _ALONE),
    *(f"ejax.runtime.{name}" for name in ("streams", "process_exit")),
)
"""Modules that need the standard library alone."""
FILES = sorted(path.relative_to(ROOT / "ejax") for path in (ROOT / "ejax").rglob("*.py"))


def unit(module: str) -> str:
    """Name the folder or root module of ejax that a module belongs to."""
    first = module.split(".")[0]
    assert first in LEVEL, f"add {first} to LAYERS"
    return first


def module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / "ejax" / path).read_text())):  # an absolute path stays as it is
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: import by full name"
            yield node.module
            if node.module.split(".")[0] == "ejax":
                yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name[0] != "_")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path: Path) -> None:
    if path.parts[0] in ("__init__.py", "data"):
        return
    for name in imports(path):
        if name.startswith("ejax.") and name != "ejax.training":
            above = LEVEL[unit(name.removeprefix("ejax."))] > LEVEL[unit(module(path))]
            assert not above, f"{path} imports {name} from a layer above it"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] == "data"], ids=str)
def test_the_data_wing_needs_numpy_only(path: Path) -> None:
    """Its worker and its consumers import neither jax nor the rest of ejax; ``prefetch`` is for who trains, ``lerobot``
    is the extra ``data``, which only ``record`` beside it may need. And what needs nothing at all."""
    extra = {"prefetch.py": ("jax", "ejax.types"), "pictures.py": ("imageio_ffmpeg", "ejax.runtime.video")}.get(
        path.name, ()
    )
    keeps = path.parts[1] in ("lerobot", "record.py")
    files = {"pyarrow", "PIL", "pydantic"} if path.parts[1] == "lerobot" else set()
    for name in imports(path):
        known = name.split(".")[0] in sys.stdlib_module_names | {"numpy"} | files
        assert known or name.startswith(("ejax.data", *STANDARD, *extra)), name
        assert keeps or not name.startswith("ejax.data.lerobot"), "needs the extra data"


def graph() -> dict[str, set[str]]:
    """List the modules of ejax and interop, each with those that it imports, at its start or in a function."""
    files = [path.relative_to(ROOT) for folder in ("ejax", "interop") for path in (ROOT / folder).rglob("*.py")]
    names = {module(path): path for path in files}
    return {name: {each for each in imports(ROOT / path) if each in names} - {name} for name, path in names.items()}


def between_folders(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    """List the folders, each with those beside it that its files import."""
    folders: dict[str, set[str]] = {}
    for name, imported in modules.items():
        one = name.split(".")
        for other in (each.split(".") for each in imported):
            depth = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
            if depth < min(len(one), len(other)) - 1:
                folders.setdefault(".".join(one[: depth + 1]), set()).add(".".join(other[: depth + 1]))
    return folders


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_imports_run_in_no_circle(kind: str) -> None:
    nodes = graph() if kind == "files" else between_folders(graph())
    TopologicalSorter(nodes).prepare()  # raises CycleError, which names the circle


def test_folders_of_envs_import_what_is_below_them() -> None:
    level = {f"ejax.envs.{name}": i for i, names in enumerate(ENV_LAYERS) for name in names}
    for one, others in between_folders(graph()).items():
        for other in others & level.keys() if one in level else ():
            assert level[other] < level[one], f"{one} imports {other}"


CLOSURES = {
    "ejax.algorithms.ppo": 4000,
    "ejax.rollout": 2200,
    "ejax.algorithms.sac": 4500,
    "ejax.envs.tasks.push_cube": 3600,
    "ejax.run": 16000,
}
"""Module -> the most lines of ejax that importing it may bring: who calls an update gets the algorithm alone, and a run
brings what all runs need."""


@pytest.mark.parametrize("name", CLOSURES)
def test_the_core_stands_alone(name: str) -> None:
    code = f"import sys, {name}; print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'ejax'))"
    files = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    sizes = {file: Path(file).read_text().count("\n") for file in files.split()}
    assert f"{name.replace('.', '/')}.py" in "".join(sizes)
    assert sum(sizes.values()) <= CLOSURES[name], sizes


@pytest.mark.parametrize("path", FILES, ids=str)
def test_torch_and_interop_stay_out(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "tensordict", "interop"}


def test_one_file_imports_orbax() -> None:
    """Its API ``v1`` is experimental: a release that changes it is met in one place."""
    files = [path for package in ("ejax", "interop", "examples") for path in (ROOT / package).rglob("*.py")]
    users = [path for path in files if "orbax" in {name.split(".")[0] for name in imports(path)}]
    assert [str(path.relative_to(ROOT)) for path in users] == ["ejax/store/arrays.py"]


def test_every_dependency_is_imported() -> None:
    other = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "pillow": "PIL", "imageio-ffmpeg": "imageio_ffmpeg"}
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {re.split("[<>=]", each)[0] for each in given}
    used = {name.split(".")[0] for path in FILES for name in imports(path)}
    assert {other.get(name, name) for name in wanted} - used == set()


@pytest.mark.parametrize("name", STANDARD)
def test_the_gate_and_the_bounded_reader_need_the_standard_library_only(name: str) -> None:
    path = Path(*name.removeprefix("ejax.").split(".")).with_suffix(".py")
    others = [name for name in imports(path) if not name.startswith(STANDARD)]
    assert not [name for name in others if name.split(".")[0] not in sys.stdlib_module_names]


def imports_at_start(path: Path) -> Iterator[str]:
    """List the modules a file imports where it is imported, up to ``importorskip``."""
    for node in ast.parse(path.read_text()).body:
        if "importorskip" in ast.dump(node):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def test_tests_are_collected_without_torch() -> None:
    files = {module(path.relative_to(ROOT)): path for path in (ROOT / "interop").rglob("*.py")}
    needs, size = {"torch", "tensordict"}, 0
    while size < len(needs):
        size = len(needs)
        needs |= {name for name, path in files.items() if needs.intersection(imports_at_start(path))}
    assert "interop.policy" in needs
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if needs.intersection(imports_at_start(path))]
    assert tests == []
