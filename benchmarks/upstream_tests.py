"""EmbodiChain's own tests, run against ejax: ``python benchmarks/upstream_tests.py CLONE [WORD ...]``.

CLONE is a clone of its repository, whose test files run unchanged, in place: ``benchmarks/upstream`` stands in for its
package, module by module (torch tensors in, ejax inside, torch tensors out). WORDs choose files. Each test counts as

    passed           all that it asserts holds of ejax
    refused          ejax differs on purpose; the reason is in ``upstream/reasons.toml``
    not applicable   it needs EmbodiChain's simulator, torch's own objects or other hardware; likewise with its reason
    failed           neither

Nobody can list a test as passed: a reason counts for a test that did not pass, or that passes without a line of ejax.
Ends with 1 if a test failed, or if a reason has become superfluous.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
FILES = (
    "tests/data_pipeline/test_online_data.py",
    "tests/learning/test_*.py",
    *(f"tests/gym/envs/managers/test_{name}.py" for name in ("reward_functors", "action_manager")),
    *(f"tests/gym/envs/managers/test_{name}.py" for name in ("observation_functors", "event_functors")),
)
KINDS = ("passed", "refused", "not applicable", "failed")
_TIMEOUT_S = 1200


@dataclass(frozen=True)
class Outcome:
    file: str
    test: str
    """``Class.test[case]``"""
    kind: str
    reason: str = ""


@dataclass
class Reasons:
    """``reasons.toml``: section -> pattern -> reason."""

    tables: dict[str, dict[str, str]]

    def __post_init__(self) -> None:
        self.used: set[str] = set()

    def judge(self, file: str, test: str, state: str, message: str) -> Outcome:
        """Classify a test by what became of it: ``passed``, ``skipped`` or ``failed``, and why."""
        name = f"{Path(file).stem}::{test.partition('[')[0]}"
        if state == "passed":
            reason = self._find("touches_nothing_of_ejax", name)
            return Outcome(file, test, "not applicable", reason) if reason else Outcome(file, test, "passed")
        if state == "skipped":
            return Outcome(file, test, "not applicable", f"EmbodiChain skips it: {message}")
        if reason := self._find("refused", name):
            return Outcome(file, test, "refused", reason)
        if reason := self._find("not_applicable", name):
            return Outcome(file, test, "not applicable", reason)
        for text, reason in self.tables["not_provided"].items():
            if f"NotProvidedError: {text}" in message:
                return Outcome(file, test, "not applicable", reason)
        return Outcome(file, test, "failed", message)

    def _find(self, section: str, name: str) -> str:
        for pattern, reason in self.tables[section].items():
            if fnmatchcase(name, pattern):
                self.used.add(pattern)
                return reason
        return ""

    def superfluous(self, files: Sequence[Path]) -> list[str]:
        """List the patterns of these files that decided nothing."""
        stems = {path.stem for path in files}
        named = [p for section in self.tables if section != "not_provided" for p in self.tables[section]]
        return [pattern for pattern in named if pattern not in self.used and pattern.partition("::")[0] in stems]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("clone", type=Path)
    parser.add_argument("words", nargs="*", help="run only files whose names contain one of them")
    args = parser.parse_args(argv)
    files = [path for pattern in FILES for path in sorted(args.clone.resolve().glob(pattern))]
    files = [path for path in files if not args.words or any(word in path.stem for word in args.words)]
    if not files:
        parser.error(f"{args.clone} has none of {', '.join(FILES)}")
    reasons = Reasons(tomllib.loads((HERE / "upstream" / "reasons.toml").read_text()))
    outcomes = [outcome for path in files for outcome in run_file(path, args.clone.resolve(), reasons)]
    print(table(outcomes))
    superfluous = reasons.superfluous(files)
    for pattern in superfluous:
        print(f"superfluous in reasons.toml: {pattern}")
    return int(bool(superfluous) or any(outcome.kind == "failed" for outcome in outcomes))


def run_file(path: Path, clone: Path, reasons: Reasons) -> list[Outcome]:
    """Run one file in its own process, in an empty folder that has EmbodiChain's configs."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "upstream"), str(HERE.parent)])
    with tempfile.TemporaryDirectory() as folder:
        here, results = Path(folder), Path(folder, "results.xml")
        (here / "pytest.ini").write_text("[pytest]\n")
        (here / "embodichain_tasks").mkdir()
        (here / "embodichain_tasks" / "configs").symlink_to(clone / "embodichain_tasks" / "configs")
        options = f"-c {here / 'pytest.ini'} --rootdir {clone} --junitxml {results}"
        # without their conftest, which starts their simulator
        command = f"-m pytest -q --noconftest -p no:cacheprovider -W ignore {options} {path}"
        done = subprocess.run(
            [sys.executable, *command.split()], cwd=here, env=environment, capture_output=True, timeout=_TIMEOUT_S
        )
        file = path.relative_to(clone).as_posix()
        if not results.exists():
            last = done.stdout.decode(errors="replace")[-2000:] + done.stderr.decode(errors="replace")[-2000:]
            return [Outcome(file, "the whole file", "failed", f"pytest ended with {done.returncode}: {last}")]
        # a test whose teardown fails too is there twice
        first = {name: (state, message) for name, state, message in reversed([*_read(results, path.stem)])}
        return [reasons.judge(file, name, *each) for name, each in reversed(first.items())]


def _read(results: Path, stem: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the state and the message of each test in a file of pytest's results."""
    for case in ET.parse(results).iter("testcase"):
        within = case.get("classname", "").rpartition(f"{stem}.")[2] if f"{stem}." in case.get("classname", "") else ""
        name = ".".join(part for part in (within, case.get("name", "")) if part)
        problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            yield name, "passed", ""
        else:
            text = (problem.get("message") or "") + ("\n" + (problem.text or "") if problem.tag == "error" else "")
            yield name, "skipped" if problem.tag == "skipped" else "failed", text.strip()


def table(outcomes: Sequence[Outcome]) -> str:
    """Make a table of the counts of each file, and the list of all reasons with the numbers of their tests."""
    lines = ["| file | passed | refused | not applicable | failed |", "|---|---|---|---|---|"]
    counts = {
        file: Counter(o.kind for o in outcomes if o.file == file) for file in dict.fromkeys(o.file for o in outcomes)
    }
    for file, count in [*counts.items(), ("all", Counter(outcome.kind for outcome in outcomes))]:
        lines.append(f"| {file} | {' | '.join(str(count[kind]) for kind in KINDS)} |")
    for kind in KINDS[1:]:
        why = Counter((outcome.file, outcome.reason) for outcome in outcomes if outcome.kind == kind)
        lines += [f"\n{kind}:"] if why else []
        if kind == "failed":
            lines += [f"  {o.file}::{o.test}: {o.reason[-400:]}" for o in outcomes if o.kind == kind]
        else:
            lines += [f"  {number} in {Path(file).stem}: {reason}" for (file, reason), number in why.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
