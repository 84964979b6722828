"""Messages advise what exists: every option belongs to the command that it is advised for."""

import ast
import functools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny

from ejax.__main__ import COMMANDS
from ejax.config import parse_config
from ejax.store.run_dir import create_run_directory, open_run_directory
from ejax.train import main

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("ejax", "interop")
    for path in (ROOT / package).rglob("*.py")
}
OPTION = re.compile(
    rf"\bejax (?P<command>{'|'.join(COMMANDS)})\b|\b(?P<foreign>docker|pip|embodichain|python -m)\b"
    r"|(?<![\w-])(?P<option>--[a-z][a-z-]*)"
)
"""A command, of which the options behind it in the text are, or an option."""
ADDED = {
    "add_trust_option": ("ejax.schema.trust", {"--trust"}),
    "add_policy_options": ("ejax.schema.values", {"--member", "--checkpoint"}),
}
NOT_ASKED = {
    ("ejax.report.__main__", "ejax.schema.trust"),
    ("interop.serving.__main__", "ejax.play.chunks"),
    ("interop.serving.__main__", "ejax.play.comparison"),
}
"""A command and a module whose advice it never gives: a report reads configs as JSON, a server only continues plans."""


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@functools.cache
def used_by(module: str) -> frozenset[str]:
    """Collect the modules that it imports anywhere, and those that they import."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in FILES or name in seen:
            continue
        seen.add(name)
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "import_late":
                waiting += [str(name.value) for name in node.args if isinstance(name, ast.Constant)]
    return frozenset(seen)


@functools.cache
def is_command(module: str) -> bool:
    return 'if __name__ == "__main__"' in FILES[module].read_text() and bool(options_of(module))


def declared(module: str) -> list[ast.Constant]:
    """Collect the names of options where parsers get them."""
    return [
        argument
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("--")
    ]


@functools.cache
def options_of(module: str) -> frozenset[str]:
    """List the options of the parser that is made in this module; of another's, where it has none."""
    made = {str(name.value) for name in declared(module)}
    for adder, (owner, options) in ADDED.items():
        if f"{adder}(" in FILES[module].read_text() and module != owner:
            made |= options
    if 'add_argument(f"--{name}"' in FILES[module].read_text():  # in a loop over a table of the module
        tables = [node.value for node in tree_of(module).body if isinstance(node, ast.Assign)]
        keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
        made |= {f"--{key.value}" for key in keys if isinstance(key, ast.Constant)}
    return frozenset(made)


def texts(module: str) -> Iterator[tuple[int, str]]:
    """Lines and texts of a module, but for docstrings and options' names; placeholders in them are empty."""
    tree = tree_of(module)
    documented = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    } | {id(name) for name in declared(module)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented | inside:
            yield node.lineno, node.value


def wrong_advice(module: str) -> list[str]:
    """Options in the module's texts that a command which can print them lacks."""
    problems = []
    using = [x for x in FILES if is_command(x) and module in used_by(x) and (x, module) not in NOT_ASKED]
    printing = [module] if is_command(module) else using
    for line, text in texts(module):
        commands = printing
        for found in OPTION.finditer(text):
            if found["foreign"] or found["command"]:
                commands = [COMMANDS[found["command"]][0]] if found["command"] else []
                continue
            lacking = [command for command in commands if found["option"] not in options_of(command)]
            problems += [f"{module}:{line} advises {found['option']}, which {command} lacks" for command in lacking]
    return problems


@pytest.mark.parametrize("module", sorted(FILES))
def test_an_option_that_is_advised_exists(module: str) -> None:
    assert wrong_advice(module) == []


@pytest.mark.parametrize("module", sorted(FILES))
def test_what_is_advised_to_be_installed_can_be(module: str) -> None:
    """ejax is on no index: its extras are installed from its folder."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line, text in texts(module):
        assert not re.search(r"pip install \S*ejax", text), f"{module}:{line}"
        for found in re.finditer(r"pip install -e '\.\[([\w,]*)\]'(?P<where> in ejax's folder)?", text):
            assert set(filter(None, found[1].split(","))) <= set(extras) and found["where"], f"{module}:{line}"


@pytest.mark.parametrize("folder", ["configs", "docs", "examples", "benchmarks"])
def test_what_is_written_to_be_installed_can_be(folder: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".yaml", ".json", ".md", ".py")]
    for path in (*files, ROOT / "README.md"):
        text = path.read_text()
        assert not re.search(r"pip install \S*ejax", text), path
        for found in re.finditer(r"pip install -e [\"']\.\[([\w,]*)\]", text):
            assert set(found[1].split(",")) <= set(extras), path


def test_wrong_advice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "device.py"
    monkeypatch.setitem(FILES, "ejax.runtime.device", file)  # train, export and others use it
    for advice, wrong in (
        ("run with --device cpu", "interop.export"),
        ("use ejax train --device cpu", None),
        ("use ejax replay --device cpu", "ejax.play.replay"),
        ("pass --odd", "ejax.train"),
        ("docker run --shm-size 1g", None),
    ):
        file.write_text(f"def tell(x):\n    raise ValueError(f'{{x}}; {advice}')\n")
        tree_of.cache_clear()
        found = wrong_advice("ejax.runtime.device")
        assert any(f", which {wrong} lacks" in problem for problem in found) if wrong else not found, advice
    tree_of.cache_clear()


def test_commands_are_found_with_their_options() -> None:
    commands = {name for name in FILES if is_command(name)}
    assert {
        "ejax.train",
        "ejax.evaluate",
        "ejax.play.replay",
        "ejax.data.record",
    } < commands
    assert {"interop.export", "interop.verify", "interop.embodichain"} < commands
    assert "--trust" in options_of("interop.verify")
    assert "ejax.store.run_dir" in used_by("interop.export")


@pytest.mark.slow
def test_a_run_of_another_device_is_read_anywhere_and_trained_on_only_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(tiny(exp_name="there", iterations=1))
    file = create_run_directory(config, tmp_path / "run").config_file
    raw = json.loads(file.read_text())
    raw["trainer"]["device"] = "cuda"
    file.write_text(json.dumps(raw))
    (file.parent / "SHA256").unlink()  # it would find the change
    assert open_run_directory(tmp_path / "run")[1].to_dict() == config.to_dict()
    assert main(["--run", str(tmp_path / "run"), "--resume", "latest"]) == 2
    error = capsys.readouterr().err
    assert "trainer.device: got 'cuda', but the devices of jax here are cpu:0" in error
    assert "set trainer.device to cpu (ejax train --device cpu)" in error
    main(["--run", str(tmp_path / "run"), "--resume", "latest", "--device", "cpu"])
    assert "trainer.device" not in capsys.readouterr().err
