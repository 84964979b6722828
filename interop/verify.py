"""``python -m interop.verify DIR``: check an export again, on any machine. Needs numpy; each format what it needs.

The files are compared with their SHA-256, and every artefact that can be loaded here answers the stored observations
and is compared with JAX's stored answers, as when it was exported (``interop.parity``). JAX itself is not needed.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from interop.artefacts import FORMATS
from interop.parity import Case, ParityError, compare, load_cases
from interop.policy_spec import PolicySpec


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 for a damaged or deviating file, 2 for no export."""
    parser = argparse.ArgumentParser("python -m interop.verify", description="Check an exported policy again.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="what interop.export wrote")
    directory = parser.parse_args(argv).directory
    try:
        artefacts = verify(directory)
    except ParityError as error:
        print(f"interop.verify: {error}", file=sys.stderr)
        return 1
    except (FileNotFoundError, ValueError) as error:
        print(f"interop.verify: {error}", file=sys.stderr)
        return 2
    print(format_table(artefacts))
    print(f"{directory / 'parity.json'}  sha256 {sha256(directory / 'parity.json')}")
    return 0


def verify(directory: Path) -> dict[str, dict[str, Any]]:
    """Check the hashes, then every artefact that can be loaded here.

    Returns:
        By format: the errors, or under ``skipped`` why it was not run.

    Raises:
        ParityError: a file was changed, or an artefact does not answer as JAX did; the text names them all.
        FileNotFoundError: ``directory`` is no export. ValueError: one of another schema.
    """
    certificate = directory / "parity.json"
    if not certificate.is_file():
        raise FileNotFoundError(
            f"{directory} is no export: it has no parity.json; make one by python -m interop.export"
        )
    report = json.loads(certificate.read_text())
    changed = [
        name
        for name, digest in report["sha256"].items()
        if not (directory / name).is_file() or sha256(directory / name) != digest
    ]
    if changed:
        raise ParityError(f"missing or changed since the export: {', '.join(changed)}. Export again.")
    spec = PolicySpec.load(directory / "policy.json")
    cases = load_cases(directory / "observations.npz")
    artefacts = check_artefacts(directory, spec, cases, report["artefacts"])
    raise_on_problems(artefacts)
    return artefacts


def check_artefacts(
    directory: Path, spec: PolicySpec, cases: list[Case], formats: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Run artefacts on the cases.

    Returns:
        By format: the errors of ``parity.compare`` over all cases, and ``cases`` one by one;
        ``problem``, a text, where it does not answer as JAX does; ``skipped``, a text, where it cannot run here.
    """
    return {name: _check_artefact(name, directory, spec, cases) for name in formats}


def raise_on_problems(artefacts: Mapping[str, Mapping[str, Any]]) -> None:
    """
    Raises:
        ParityError: naming each artefact with a problem.
    """
    problems = [f"  {name}: {facts['problem']}" for name, facts in artefacts.items() if "problem" in facts]
    if problems:
        raise ParityError("not the policy that JAX computes:\n" + "\n".join(problems))


def format_table(artefacts: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each artefact: the largest errors over all outputs, in the environment and on all cases."""
    lines = [
        f"{'':<12} {'in the environment':^36} {'adversarial too':^36}",
        f"{'format':<12}" + f" {'abs':>8} {'rel':>8} {'ULP':>9} {'ULP of row':>10}" * 2 + f" {'of allowed':>10}",
    ]
    for name, facts in artefacts.items():
        if "skipped" in facts:
            lines.append(f"{name:<12} skipped: {facts['skipped']}")
            continue
        groups = (list(facts["cases"]["environment"].values()), [facts])
        shown = [
            {key: max(errors[key] for errors in group) for key in facts if key.startswith("max")} for group in groups
        ]
        numbers = "".join(
            f" {x['max_abs']:>8.1e} {x['max_rel']:>8.1e} {x['max_ulp']:>9.0f} {x['max_row_ulp']:>10.1f}" for x in shown
        )
        lines.append(f"{name:<12}{numbers} {facts['of_allowed']:>10.1%}")
    return "\n".join(lines)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_artefact(name: str, directory: Path, spec: PolicySpec, cases: list[Case]) -> dict[str, Any]:
    form = FORMATS[name]
    if missing := form.missing():
        return {"file": form.file, "skipped": f"not installed here; pip install {' '.join(missing)}"}
    try:
        run = form.load(directory / form.file, spec)
        by_case = {case.name: compare(run, case, spec) for case in cases}
    except ParityError as error:
        return {"file": form.file, "problem": str(error)}
    every = [errors for outputs in by_case.values() for errors in outputs.values()]
    facts: dict[str, Any] = {"file": form.file}
    facts |= {key: max(errors[key] for errors in every) for key in every[0]}
    beyond = [
        f"{output} of '{case}' is off by {errors['max_abs']:.3g}, {errors['of_allowed']:.3g} times what is allowed"
        for case, outputs in by_case.items()
        for output, errors in outputs.items()
        if not errors["of_allowed"] <= 1.0
    ]
    return facts | ({"problem": "; ".join(beyond)} if beyond else {}) | {"cases": by_case}


if __name__ == "__main__":
    sys.exit(main())
