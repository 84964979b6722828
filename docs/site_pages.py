"""Pages of the site that are made from the code: a hook of mkdocs, and by itself what writes ``reference/*.md``
and the notebooks of the tutorials, ``examples/notebooks``.

python docs/site_pages.py       # after a change of a command line, a docstring or a tutorial; a test compares

A page of the reference has mkdocstrings' directives in comments, ``<!-- site``, which this hook opens: outside the site
a reader sees the table of names above them instead.
"""

import ast
import contextlib
import importlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
COMMANDS_FILE = REFERENCE / "commands.md"
_SUBCOMMANDS = {"config": ("schema", "check"), "embodichain": ("to-pt", "from-pt")}
_COLUMNS = "100"
_HEAD = "| name | what it is |\n|---|---|\n"
_BLOCK = re.compile(rf"(?:^{re.escape(_HEAD)}((?:\| .*\n)*)\n)?^<!-- site\n((?:(?!-->).*\n)*)-->\n", re.M)
"""A table of names, if there is one, and the directives that it stands for."""
_OUTSIDE = re.compile(r"\[([^]]+)\]\((?:\.\./)+((?:configs|benchmarks|examples)/[^)#]+)[^)]*\)")
"""A link to a file of the repository, which the site does not have."""


TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOKS = ROOT / "examples" / "notebooks"
_TO_DOCS = re.compile(r"\]\(((?:\.\./)*[\w/.]+\.(?:md|py|png))(#[\w-]+)?\)")
_INSTALL = """\
# Installs ejax where it is missing: a wheel beside this notebook (release.sh builds one), else the clone around it.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("ejax") is None:
    found = [*Path().glob("ejax-*.whl"), *(each for each in Path().resolve().parents if (each / "release.sh").exists())]
    assert found, "put a wheel of ejax beside this notebook, or open it in a clone of the repository"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"{found[0]}[export]"], check=True)
if Path("../desk_lamp.xml").exists():
    os.chdir("..")  # the folder of the examples"""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that no file holds."""
    from mkdocs.structure.files import File

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    changelog = re.sub(r"(?<![`\w])docs/(\w+)\.md", r"[\1.md](\1.md)", changelog)
    schema = json.loads((ROOT / "ejax" / "config.schema.json").read_text(encoding="utf-8"))
    for path, text in (("changelog.md", changelog), ("reference/config.md", config_page(schema))):
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Open the directives of a page of the reference, and link the names above; name the repository's files by path."""

    def opened(block: re.Match[str]) -> str:
        rows = zip((block[1] or "").splitlines(), directed(block[2]), strict=False)  # a test compares
        linked = "".join(re.sub(r"^\| (`[^`]+`)", rf"| [\1][{name}]", row) + "\n" for row, name in rows)
        return f"{_HEAD}{linked}\n{block[2]}"

    markdown = _OUTSIDE.sub(r"\1 (`\2`)", re.sub(rf"\({_OUTSIDE.pattern}\)", r"(\1, `\2`)", markdown))
    return _BLOCK.sub(opened, markdown) if page.file.src_uri.startswith("reference/") else markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Links between tutorials and pages are those of the files, as Jupyter follows them; on the site they are pages."""
    if not page.file.src_uri.startswith("tutorials/") or not page.file.src_uri.endswith(".py"):
        return html
    return re.sub(r'href="((?:\.\./)?[\w/]+)\.(?:md|py)((?:#[\w-]+)?)"', r'href="\1.html\2"', html)


def config_page(schema: Mapping[str, Any]) -> str:
    """One table a section, one row a key: type, default, allowed values, what it is."""
    parts = [
        "# Config keys",
        "Made from `ejax/config.schema.json`, which editors read too. *ejax:* marks what EmbodiChain does not have. "
        "What the sections are for, and how they go together: [The config](../config.md).",
    ]
    for title, node in _sections(schema):
        parts += [f"## {title}", *([node["description"]] if "description" in node else [])]
        required = node.get("required", ())
        rows = [_row(key, each, required=key in required) for key, each in node.get("properties", {}).items()]
        parts.append("\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def reference_page(text: str) -> str:
    """Put above the directives of each section a table of their names, each with its docstring's first sentence."""

    def with_table(block: re.Match[str]) -> str:
        rows = [f"| `{_public(name)}` | {_cell(_summary(name))} |\n" for name in directed(block[2])]
        return f"{_HEAD}{''.join(rows)}\n<!-- site\n{block[2]}-->\n"

    return _BLOCK.sub(with_table, text)


def directed(text: str) -> list[str]:
    """List the dotted names that directives of mkdocstrings show."""
    names: list[str] = []
    for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", text, re.M):
        members = re.search(r"members: \[(.*)\]", options)
        names += [f"{name}.{member}" for member in members[1].split(", ")] if members else [name]
    return names


def _public(name: str) -> str:
    """Name the outermost package that offers an object."""
    module, _, attribute = name.rpartition(".")
    parts = module.split(".")
    packages = [".".join(parts[:count]) for count in range(1, len(parts))] if parts[0] == "ejax" else []
    offers = (each for each in packages if attribute in getattr(importlib.import_module(each), "__all__", ()))
    return f"{next(offers, module)}.{attribute}"


def _summary(name: str) -> str:
    """Take the first sentence of a docstring, of a module of torch's from its source: torch need not be there."""
    module, _, attribute = name.rpartition(".")
    if module.startswith("interop."):
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        found = [node for node in tree.body if getattr(node, "name", None) == attribute]
        text = next(ast.get_docstring(node) for node in found if isinstance(node, ast.ClassDef | ast.FunctionDef))
    else:
        text = getattr(importlib.import_module(module), attribute).__doc__
    sentence = " ".join((text or "").strip().split("\n\n")[0].split()).partition(". ")[0]
    return sentence.removesuffix(".").removesuffix(". [B]").replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def commands_page() -> str:
    """Collect each command line's help; of commands that take the same arguments, once."""
    from ejax.__main__ import COMMANDS, GROUPS

    rows = [
        f"| {group.lower()} | [`{name}`](#{name}) | {what} |"
        for group, commands in GROUPS.items()
        for name, (_, what) in commands.items()
    ]
    parts = [
        "# Command lines",
        "Every command with all its options, as `--help` prints them.\n"
        "`python -m ejax COMMAND …` is the same, and `python -m ejax.train …` is `ejax train …`.",
        "The result is printed first. If something beside it cannot be written (a report, a log, a file),\n"
        "a line on standard error says what and why, and the exit code is 1.",
        "```bash\nejax train push_cube/ppo trainer.seed=3\nejax evaluate outputs/push_cube_ppo --episodes 100\n```",
        "\n".join(["| to | command | what it does |", "|---|---|---|", *rows]),
    ]
    seen: dict[tuple[str, ...], str] = {}
    for name, (module, what) in COMMANDS.items():
        parts += [f"## {name}", f"{what[0].upper()}{what[1:]}."]
        for words in ([], *([each] for each in _SUBCOMMANDS.get(name, ()))):
            text = _help(module, [*words, "--help"])
            first = seen.setdefault(tuple(re.sub(r"usage: ejax \S+", "", text).split()), name)
            parts.append(
                f"```text\n{text}```" if first == name else f"The arguments are those of [`{first}`](#{first})."
            )
    return "\n\n".join(parts) + "\n"


def notebook(tutorial: Path) -> str:
    """Make a Jupyter notebook of a tutorial: a script with ``# %%`` marks, or a page with blocks of Python."""
    text = tutorial.read_text(encoding="utf-8")
    if tutorial.suffix == ".py":
        parts = re.split(r"^# %%( \[markdown\])?\n", text, flags=re.M)
        cells = [(bool(mark), body.strip("\n")) for mark, body in zip(parts[1::2], parts[2::2], strict=True)]
        cells = [(prose, re.sub(r"^# ?", "", body, flags=re.M) if prose else body) for prose, body in cells]
    else:
        parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
        cells = [(i % 2 == 0, body.strip("\n")) for i, body in enumerate(parts)]
    cells = [(prose, _TO_DOCS.sub(_as_from_notebooks, body) if prose else body) for prose, body in cells if body]
    head, *rest = cells
    made = [
        {
            "cell_type": "markdown" if prose else "code",
            "id": f"cell-{i}",
            "metadata": {},
            **({} if prose else {"execution_count": None, "outputs": []}),
            "source": body.splitlines(keepends=True),
        }
        for i, (prose, body) in enumerate([head, (False, _INSTALL), *rest])
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _as_from_notebooks(link: re.Match[str]) -> str:
    target, anchor = link[1], link[2] or ""
    if re.fullmatch(r"\d\d_\w+\.(?:py|md)", target):
        return f"]({Path(target).with_suffix('.ipynb')}{anchor})"
    target = target.removeprefix("../") if target.startswith("../") else f"tutorials/{target}"
    return f"](../../docs/{target}{anchor})"


def _help(module: str, arguments: list[str]) -> str:
    text, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            importlib.import_module(module).main(arguments)
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return text.getvalue()


def _sections(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(Title, object) of every section, each once, at the first place that has it."""
    definitions = schema["$defs"]
    yield "Sections", {key: value for key, value in schema.items() if key != "description"}
    waiting = [(path, "", name) for path, name in _below("", schema)]
    for each in definitions["AlgorithmConfig"]["allOf"]:
        algorithm = each["if"]["properties"]["name"]["pattern"].removeprefix("^(?i:").removesuffix(")$")
        options = _reference(each["then"]["properties"]["cfg"])
        waiting.append(("algorithm.cfg", f" of {algorithm}", str(options)))
    seen: set[str] = set()
    while waiting:
        path, whose, name = waiting.pop(0)
        if name not in seen:
            seen.add(name)
            yield f"`{path}`{whose}", definitions[name]
            waiting = [*((below, "", each) for below, each in _below(path, definitions[name])), *waiting]


def _below(path: str, node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List the sections of an object: its path, and the name of its definition."""
    for key, each in node.get("properties", {}).items():
        if each.get("description", "").startswith("The same as "):
            continue
        name = _reference(each)
        if name is not None:
            yield f"{path}.{key}".lstrip("."), name
        for many, mark in ((each.get("additionalProperties"), "<name>"), (each.get("items"), "<i>")):
            if isinstance(many, dict) and _reference(many):
                yield f"{path}.{key}.{mark}".lstrip("."), str(_reference(many))


def _reference(node: Mapping[str, Any]) -> str | None:
    node = next((each for each in node.get("anyOf", ()) if "$ref" in each), node)
    return node["$ref"].rpartition("/")[2] if "$ref" in node else None


def _row(key: str, node: Mapping[str, Any], *, required: bool) -> str:
    default = "required" if required else ""
    if "default" in node:
        default = (
            "section" if isinstance(node["default"], dict) and node["default"] else f"`{json.dumps(node['default'])}`"
        )
    cells = (f"`{key}`", _type(node), default.replace("`null`", "none"), node.get("description", ""))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _type(node: Mapping[str, Any]) -> str:
    """Write the type and the allowed values, as a person does."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(each) for each in node["anyOf"] if each.get("type") != "null"))
    if "enum" in node or "const" in node:
        return ", ".join(f"`{each}`" for each in node.get("enum", [node.get("const")]))
    if "$ref" in node:
        return "section"
    bounds = [
        f"{sign} {node[name]:,}"
        for name, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if name in node
    ]
    kind = node.get("type", "any")
    if kind == "array":
        items = node.get("items") or {}
        kind = f"list of {_type(items)}" if items else "list"
        if "prefixItems" in node:
            kind = f"[{', '.join(_type(each) for each in node['prefixItems'])}]"
    return ", ".join([{"object": "mapping"}.get(kind, kind), *bounds])


if __name__ == "__main__":
    COMMANDS_FILE.write_text(commands_page(), encoding="utf-8")
    for file in sorted(REFERENCE.glob("*.md")):
        file.write_text(reference_page(file.read_text(encoding="utf-8")), encoding="utf-8")
    NOTEBOOKS.mkdir(exist_ok=True)
    for file in sorted(TUTORIALS.glob("[0-9]*")):
        (NOTEBOOKS / f"{file.stem}.ipynb").write_text(notebook(file), encoding="utf-8")
