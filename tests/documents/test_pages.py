"""Pages name functions, files, keys and error messages that exist."""

import functools
import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KEYED = ("architecture.md", "training_process.md", "best_practices.md", "faq.md")
PAGES = ("../README.md", *sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")))
OTHERS = ("coming_from/", "compatibility.md", "reference/", "upstream/")
"""Pages full of other libraries' names, and those that are made from the code."""
NOT_IN_THE_CODE = {
    "OMP_NUM_THREADS", "WARP_CACHE_PATH", "DataFrame", "ppo_lstm", "JaxTrainer",  # of other software
    "HeavyMass", "HeavyMassRL", "step812_row3", "encoder_camera",  # of an example
    "h1_2_flat", "microduck_flat",  # folders of EmbodiChain
    "flashSAC_base", "run_mujoco", "reward_normalization",  # files of FlashSAC
    "evaluate_s", "physics_s", "cuda0_in_use_mib", "cuda0_peak_mib", "fresh_best", "fresh_last",  # put together
}  # fmt: skip
OF_A_RUN = ("configs/resolved.json", "configs/versions.json")
WORDS = 18
"""Characters of a message between two things that vary, from which on they are looked up."""


def code_of(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Collect the words of all sources but this one, configs and models among them."""
    files = (
        path
        for top in ("ejax", "interop", "benchmarks", "tests", "examples", "configs")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml", ".json", ".toml", ".xml", ".csv") and path != Path(__file__)
    )
    return {word for path in files for word in re.findall(r"\w+", f"{path.stem} {path.read_text(encoding='utf-8')}")}


def source() -> str:
    """Read ejax and interop, texts over several lines joined."""
    files = (
        path.read_text(encoding="utf-8") for top in ("ejax", "interop") for path in sorted((ROOT / top).rglob("*.py"))
    )
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(files))


def lookup(name: str) -> Any:
    """Import the longest prefix of ``name`` that is a module, and take the rest from it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if importlib.util.find_spec(parts[0]) and is_module(parts[:count]):
            return functools.reduce(getattr, parts[count:], importlib.import_module(".".join(parts[:count])))
    raise ModuleNotFoundError(name)


def is_module(parts: list[str]) -> bool:
    place = ROOT.joinpath(*parts)
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_a_page_names_exist(page: str) -> None:
    code = " ".join(each for each in code_of(page) if "python -m" not in each)
    for name in sorted(set(re.findall(r"(?<![\w./-])(?:ejax|interop)(?:\.\w+)+", code))):
        try:
            lookup(name)
        except ModuleNotFoundError as error:
            assert error.name in ("torch", "tensordict"), name  # what needs them is tested where they are installed


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    tops = "ejax|interop|tests|examples|benchmarks|configs|docs"
    for name in re.findall(rf"(?<![\w/.{{-])(?:{tops})/[\w/.-]*\w", " ".join(code_of(page))):
        gymnasiums = re.fullmatch(r"ejax/\w+-v0", name)
        assert (ROOT / name).exists() or name in OF_A_RUN or gymnasiums or name.endswith("/NAME"), name


def test_files_and_folders_of_the_architecture_exist() -> None:
    named = [name for name in code_of("architecture.md") if re.fullmatch(r"[\w/]+(\.py|/)", name)]
    missing = [name for name in named if not any((ROOT / top / name).exists() for top in ("", "ejax", "ejax/envs"))]
    assert len(named) > 30 and missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(OTHERS)])
def test_identifiers_that_a_page_names_occur_in_the_code(page: str, words: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])(?!test_)[A-Za-z_]\w*", " ".join(code_of(page))))
    identifiers = {name for name in named if "_" in name or re.search("[a-z][A-Z]", name)}
    assert identifiers - words - NOT_IN_THE_CODE == set()


@pytest.mark.parametrize("page", KEYED)
def test_keys_that_a_page_names_exist(page: str) -> None:
    schema = json.loads((ROOT / "ejax" / "config.schema.json").read_text(encoding="utf-8"))
    keys = {key for node in (schema, *schema["$defs"].values()) for key in node.get("properties", {})}
    for name in re.findall(r"\b(?:trainer|collector|algorithm\.cfg|policy)\.(\w+)", " ".join(code_of(page))):
        assert name in keys, name


def test_messages_of_the_questions_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8").partition("## Errors")[2]
    known, looked_up = source(), 0
    for message in re.findall(r"^\| `([^`]+)`", page, re.M):
        if message.startswith(("RESOURCE_EXHAUSTED", "no video", "quarantine/")):  # of XLA and MuJoCo, or no message
            continue
        for part in re.split(
            r"'[^']*'|\d+|…|;|cpu:|trainer\.num_envs|my_task:Lift|loss and gradient|skipped_minibatches|outputs",
            message,
        ):
            if len(words := part.strip(" .:,;")) >= WORDS:
                assert words in known, f"{words!r} of {message!r}"
                looked_up += 1
    assert looked_up > 10
