"""The pages about how ejax works name what there is: functions, keys, files, and the texts of errors."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("architecture.md", "training_process.md", "best_practices.md", "faq.md")
WORDS = 18
"""Characters of a message between two things that vary, from which on they are looked up."""


def code_of(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))


def source() -> str:
    """Read ejax and interop, texts over several lines joined."""
    files = (
        path.read_text(encoding="utf-8") for top in ("ejax", "interop") for path in sorted((ROOT / top).rglob("*.py"))
    )
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(files))


@pytest.mark.parametrize("page", PAGES)
def test_functions_that_a_page_names_exist(page: str) -> None:
    for name in re.findall(r"(ejax\.[\w.]+)", " ".join(each for each in code_of(page) if "python -m" not in each)):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    for name in re.findall(
        r"(?<![/.])\b(?:ejax|tests|examples|benchmarks|configs)/[\w/]+(?:\.\w+)?", " ".join(code_of(page))
    ):
        assert (ROOT / name).exists() or name == "configs/resolved.json", name  # the latter is of a run


@pytest.mark.parametrize("page", PAGES)
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
