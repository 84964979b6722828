"""Facts in JSON files: what is not of the stated form is refused, with the file and the reason."""

from pathlib import Path

from case_tables import cases, refused
from pydantic import BaseModel

from ejax.logs.json_records import FactsError, read_facts


class Facts(BaseModel):
    number: int
    name: str = ""


def test_facts_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"number": 3, "more": [1, 2]}')
    assert read_facts(tmp_path / "a.json", Facts) == {"number": 3, "more": [1, 2]}


@cases(
    "content text",
    (b"", "is not JSON, or was cut short"),
    (b'{"number": 3, "na', r"cut short: .*line 1, column 15"),
    (b"\xff\xfe", "is not text in UTF-8"),
    (b"[1, 2]", "holds a list; it must be a mapping"),
    (b"{}", "lacks the key 'number'"),
    (b'{"number": "1"}', "has a wrong 'number': .*valid integer, got '1'"),
    (b'{"number": true}', "has a wrong 'number'"),
    (b'{"number": 1, "name": ' + b"[" * 90 + b"]" * 90 + b"}", "has a wrong 'name'.{,150}$"),
    (b"[" * 200_000, "is nested deeper than 100 levels"),
    (b'{"number": 1, "more": ' + b"[" * 100 + b"]" * 100 + b"}", "is nested deeper than 100 levels"),
    (b'{"number": ' + b"1" * 5000 + b"}", "has an integer of 5000 digits; allowed are 100"),
    ids=["empty", "cut", "bytes", "list", "lacks", "text", "bool", "long", "deep", "closed", "digits"],
)
def test_what_is_no_such_file_is_refused_by_name(content: bytes, text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    error = refused(read_facts, file, Facts, match=text, error=FactsError)
    assert str(file) in str(error)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    refused(read_facts, tmp_path, Facts, match="cannot be read: Is a directory", error=FactsError)
    refused(read_facts, tmp_path / "none.json", Facts, match="cannot be read: No such file", error=FactsError)
