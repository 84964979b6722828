"""Every export that these tests make is valid by the schemas of its documents."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from interop import export

SCHEMAS = Path(export.__file__).with_name("schemas")


@pytest.fixture(autouse=True, scope="session")
def _exports_are_valid_by_their_schemas() -> Iterator[None]:
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        yield
        return
    validators = {
        path.name.replace(".schema", ""): Draft202012Validator(json.loads(path.read_text()))
        for path in SCHEMAS.glob("*.schema.json")
    }
    write = export._write

    @functools.wraps(write)
    def checked(
        to: Path, formats: Any, trained: Any, documents: Mapping[str, Any], *others: Any, **options: Any
    ) -> dict[str, Any]:
        report = write(to, formats, trained, documents, *others, **options)
        for name in documents.keys() & validators.keys():
            validators[name].validate(json.loads((to / name).read_text()))
        validators["parity.json"].validate(json.loads((to / "parity.json").read_text()))
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_write", checked)
        yield
