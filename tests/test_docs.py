"""The manual names what there is. ``mkdocs build --strict`` builds it; this needs no mkdocs."""

import ast
import importlib
import importlib.util
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import ejax.config
import ejax.data

ROOT = Path(__file__).parents[1]
ODD_WORDS = re.compile(r"\b(told|tells?|said|anew|whatever|in turn)\b", re.IGNORECASE)
"""Words that CONTRIBUTING.md leaves out of docstrings, comments and pages."""
DOCS = ROOT / "docs"
MADE = {"changelog.md", "reference/config.md"}
"""Pages that ``docs/site_pages.py`` makes when the site is built."""
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
"""Measurements and counts behind the pages, which the site leaves out; links lead to them."""
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(DOCS.glob("tutorials/*.py")), *NOTES]


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def referenced() -> Iterator[str]:
    """Dotted names in the pages of the reference."""
    for page in DOCS.glob("reference/*.md"):
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text(encoding="utf-8"), re.M):
            members = re.search(r"members: \[(.*)\]", options)
            yield from (f"{name}.{member}" for member in members[1].split(", ")) if members else [name]


def test_what_the_reference_names_exists() -> None:
    names = list(referenced())
    assert len(names) > 100
    for name in names:
        module, _, attribute = name.rpartition(".")
        if name.startswith(("interop.policy", "interop.dataset", "interop.envs")):  # they import torch
            assert re.search(
                rf"^(def|class) {attribute}\b", (ROOT / f"{module.replace('.', '/')}.py").read_text(), re.M
            )
        else:
            assert (getattr(importlib.import_module(module), attribute).__doc__ or "").strip(), f"{name} says nothing"


@pytest.mark.parametrize("package", [ejax, ejax.config, ejax.data], ids=lambda package: package.__name__)
def test_type_checkers_see_what_is_looked_up_lazily(package: ModuleType) -> None:
    stub = ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text())
    named = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    named |= {ast.unparse(node.targets[0]) for node in stub.body if isinstance(node, ast.Assign)}
    assert named == set(package.__all__)


def test_all_that_ejax_offers_is_in_the_reference() -> None:
    # EmbodiChain's name for an object is ejax's, which is in the reference
    own = [name for name in ejax.__all__ if name not in ejax._EMBODICHAINS]
    offered = {f"{getattr(ejax, name).__module__}.{name}" for name in own}
    assert offered - set(referenced()) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            place = (page.parent / target).resolve()
            made = place.is_relative_to(DOCS) and str(place.relative_to(DOCS)) in MADE and page != ROOT / "README.md"
            assert made or place.exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation() -> None:
    # tags such as !ENV are mkdocs' own
    text = re.sub(r"!ENV ", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = set(re.findall(r"[\w/]+\.(?:md|py)\b", str(yaml.safe_load(text)["nav"])))
    there = {str(path.relative_to(DOCS)) for path in (*DOCS.rglob("*.md"), *DOCS.glob("tutorials/*.py"))}
    assert named == there | MADE


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.name)
def test_a_page_leads_to_each_note(note: Path) -> None:
    pages = (page.read_text(encoding="utf-8") for page in PAGES if page != note)
    assert any(f"/{note.name}" in text or f"]({note.name}" in text for text in pages)


def test_the_page_of_command_lines_is_what_they_say(site_pages: ModuleType) -> None:
    written = site_pages.COMMANDS_FILE.read_text(encoding="utf-8")
    assert written.split() == site_pages.commands_page().split(), "run: python docs/site_pages.py"


@pytest.mark.parametrize("tutorial", sorted(DOCS.glob("tutorials/[0-9]*")), ids=lambda tutorial: tutorial.stem)
def test_a_tutorials_notebook_is_made_from_it(site_pages: ModuleType, tutorial: Path) -> None:
    written = (site_pages.NOTEBOOKS / f"{tutorial.stem}.ipynb").read_text(encoding="utf-8")
    assert written == site_pages.notebook(tutorial), "run: python docs/site_pages.py"
    prose = "".join("".join(cell["source"]) for cell in json.loads(written)["cells"] if cell["cell_type"] != "code")
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        assert target.startswith("http") or (site_pages.NOTEBOOKS / target).exists(), target


@pytest.mark.parametrize("page", sorted(DOCS.glob("reference/*.md")), ids=lambda page: page.stem)
def test_the_tables_of_names_are_what_the_docstrings_say(site_pages: ModuleType, page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert written == site_pages.reference_page(written), "run: python docs/site_pages.py"
    shown = re.findall(r"^\| `(?:ejax|interop)\.[\w.]+` \| \S.* \|$", written, re.M)
    assert len(shown) == len(site_pages.directed(written))
    assert "\n::: " not in re.sub(r"<!-- site\n.*?-->", "", written, flags=re.S), "directives stand in <!-- site … -->"


def test_the_page_of_config_keys_has_a_row_for_each(site_pages: ModuleType) -> None:
    schema = json.loads((ROOT / "ejax" / "config.schema.json").read_text(encoding="utf-8"))
    page = site_pages.config_page(schema)
    rows = re.findall(r"^\| `(\w+)` \| \S.* \| .* \| \S.* \|$", page, re.M)
    keys = [key for node in (schema, *schema["$defs"].values()) for key in node.get("properties", {})]
    assert sorted(rows) == sorted(keys)


def test_a_deprecated_name_works_and_names_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``docs/stability.md`` promises."""
    monkeypatch.setitem(ejax._DEPRECATED, "generalized_advantages", ("gae", "0.3"))
    with pytest.warns(DeprecationWarning, match=r"ejax\.generalized_advantages is now ejax\.gae, .*with 0\.3"):
        assert ejax.generalized_advantages is ejax.gae
    assert "generalized_advantages" not in dir(ejax)


@pytest.mark.parametrize("folder", ["ejax", "interop", "benchmarks", "examples", "tests"])
def test_docstrings_begin_with_a_verb_or_a_noun_and_avoid_odd_words(folder: str) -> None:
    """CONTRIBUTING.md has the style; words that it leaves out are at home in no docstring."""
    opening = re.compile(r"(What|Where|How|Of|Which|That|Whether|Who|Why|When|Give the|Give a|Recognize)\b")
    odd = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            found = isinstance(text, str) and (opening.match(text.strip()) or ODD_WORDS.search(text))
            odd += [f"{path.relative_to(ROOT)}:{node.lineno}: {found[0]}"] if found else []
        with path.open("rb") as file:
            comments = [each for each in tokenize.tokenize(file.readline) if each.type == tokenize.COMMENT]
        odd += [f"{path.relative_to(ROOT)}:{each.start[0]}" for each in comments if ODD_WORDS.search(each.string)]
    assert not odd


@pytest.mark.parametrize(
    "page", sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]), ids=lambda page: page.name
)
def test_pages_avoid_odd_words(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").split("\n")
    assert not [f"{number}: {line}" for number, line in enumerate(lines, 1) if ODD_WORDS.search(line)]
