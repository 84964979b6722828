"""Imports inside ejax go down the layers only."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    [
        *("types", "finite", "distributions", "returns", "losses", "optim"),
        *("sharding", "device", "interrupt", "registry", "trust", "frozen", "problems", "shorten", "facts", "digests"),
    ],
    [
        *("policies", "envs", "rollout", "episodes", "collectors", "checkpoint", "metrics", "metric_log"),
        *("console", "video", "recorder"),
    ],
    ["evaluation", "algorithms", "experts", "data"],
    ["config"],
    [
        *("environments", "steppers", "parts", "host_parts", "cloning", "demonstrations", "build"),
        *("run_dir", "evaluators", "warm_start", "watchdog"),
    ],
    ["run", "skipped", "leave"],
    ["train", "pretrain", "evaluate", "replay", "__main__"],
]
"""A module may import from its own layer and from those above it in this list. ``data`` has a stricter
rule, below; ``registry`` names what is above it as text, and imports it when asked."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
KEPT = [
    *(f"lerobot_{part}.py" for part in ("format", "metadata", "parquet", "read", "recording")),
    *(f"lerobot_{part}.py" for part in ("rows", "schema", "stage", "write")),
    *("extra.py", "pictures.py", "record.py", "recorded.py"),
]
"""Of the data wing, what keeps episodes; needs the extra ``data``, and nothing else of the wing imports it."""
FILES = sorted(path.relative_to(ROOT / "ejax") for path in (ROOT / "ejax").rglob("*.py"))


def unit(path):
    """The module or package right below ejax that a file belongs to."""
    return path.parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse((ROOT / "ejax" / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield node.module
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if node.module == "ejax" and alias.name[0] != "_"
            )


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
    if unit(path) in ("__init__", "data"):
        return
    assert unit(path) in LEVEL, f"give {unit(path)} its layer"
    for name in imports(path):
        if name.startswith("ejax."):
            used = name.split(".")[1]
            assert used in LEVEL, f"give {used} its layer"
            assert LEVEL[used] <= LEVEL[unit(path)], f"{path} imports {name} from a layer above it"


@pytest.mark.parametrize("path", [path for path in FILES if unit(path) == "data"], ids=str)
def test_the_data_wing_needs_numpy_only(path):
    """Its worker and its consumers import neither jax nor the rest of ejax; ``prefetch`` is for who trains, kept
    episodes are the extra ``data``. Besides ``ejax.trust``, which needs the standard library only."""
    extra = {
        "prefetch.py": {"jax", "ejax.types"},
        "extra.py": {"pyarrow", "pyarrow.compute", "pyarrow.parquet", "PIL"},
        "pictures.py": {"imageio_ffmpeg", "ejax.video"},
    }
    for name in imports(path):
        known = name.split(".")[0] in sys.stdlib_module_names | {"numpy"} or name.startswith(
            ("ejax.data.", "ejax.trust")
        )
        assert known or name in extra.get(path.name, ()) or name == "_posixshmem", name
    if path.name not in {"prefetch.py", *KEPT}:
        assert not {name.removeprefix("ejax.data.") + ".py" for name in imports(path)} & set(KEPT), (
            "needs the extra data"
        )


@pytest.mark.parametrize("path", FILES, ids=str)
def test_torch_and_interop_stay_out(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "tensordict", "interop"}


def test_the_gate_needs_the_standard_library_only():
    assert not [name for name in imports(Path("trust.py")) if name.split(".")[0] not in sys.stdlib_module_names]
