"""``ejax verify DIR``: check an export again, on any machine. Needs numpy; each format its own packages.

The folder is compared with the lists in its ``parity.json``, every file with its SHA-256, and every artefact that can
be loaded here answers the stored observations and is compared with JAX's stored answers, as when it was exported
(``interop.artefacts.parity``). So does the tokenizer of a policy that reads text, and every artefact must give the same
bits twice. JAX itself is not needed.

Nothing in the folder runs code unless ``--trust`` is given: pt2 and torchscript can, so without it they are compared by
their SHA-256 alone and listed as not verified.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from interop.artefacts import leapp_bundle
from interop.artefacts.formats import FORMATS
from interop.artefacts.texts import check_texts
from interop.standalone_verify import (
    LEAPP_FILES,
    NEXT_MEMORY,
    Case,
    Interface,
    check_cases,
    check_episode_file,
    check_files,
    load_cases,
    load_contract,
    measure,
    parse_json,
    print_verdict,
    raise_on_problems,
    read_bytes,
    read_certificate,
    write_rows,
)
from interop.twin.kinds import load_spec

_COLUMNS = ("max_abs", "max_rel", "max_ulp", "max_row_ulp")
_NOT_TRUSTED = "not verified: can run code; add --trust if you know who made it"


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code, see ``--help``."""
    args = _parser().parse_args(argv)
    table = partial(format_table, directory=args.directory, verbose=args.verbose)
    return print_verdict("ejax verify", args.directory, lambda: verify(args.directory, trust=args.trust), table)


def verify(directory: Path, *, trust: bool = False) -> dict[str, dict[str, Any]]:
    """Verify an export: the lists and the hashes, then every artefact that can be loaded here.

    Args:
        trust: also run the formats that can run code of the folder's maker.

    Returns:
        By format: the errors, or under ``skipped`` why it was not run.

    Raises:
        ParityError: a file was changed, or an artefact does not answer as JAX did; the text names them all.
        FileNotFoundError: ``directory`` is not an export. ValueError: one of another schema.
    """
    report = read_certificate(directory)
    check_files(directory, report)
    contract, cases = load_contract(directory), load_cases(directory / "observations.npz")
    check_cases(cases, contract, report["rows"])
    check_episode_file(directory, contract)
    # policies of other libraries have an ONNX graph alone, which the contract describes
    foreign = report["artefacts"].keys() == {"onnx"} and "policy.json" not in report["sha256"]
    spec: Any = contract if foreign else load_spec(directory / "policy.json")
    check_cases(cases, spec, report["rows"])
    if not foreign:
        check_texts(directory, spec)
    artefacts = check_artefacts(directory, spec, cases, report["artefacts"], trust=trust)
    if report["sha256"].keys() & {*LEAPP_FILES}:
        artefacts["leapp"] = check_bundle(directory, spec, cases, report["versions"])
    raise_on_problems(artefacts)
    return artefacts


def check_bundle(directory: Path, spec: Interface, cases: list[Case], versions: Mapping[str, str]) -> dict[str, Any]:
    """Run a LEAPP bundle on the cases, as ``check_artefacts`` does; ``versions``: of the maker's libraries."""
    facts = {"file": leapp_bundle.MODEL}
    if None in map(find_spec, ("onnxruntime", "yaml")):
        return facts | {"skipped": "skipped: not installed here; pip install onnxruntime pyyaml"}
    contract = load_contract(directory)
    outputs = tuple(name for name in contract.outputs if name in ("action", NEXT_MEMORY))
    interface = replace(contract, outputs=outputs)
    made_with = {name: version for name, version in versions.items() if name not in ("python", "machine")}
    return facts | measure(lambda: leapp_bundle.load_bundle(directory, spec, made_with), cases, interface)


def check_artefacts(
    directory: Path, spec: Interface, cases: list[Case], formats: Iterable[str], *, trust: bool
) -> dict[str, dict[str, Any]]:
    """Run artefacts on the cases.

    Args:
        trust: also those that can run code.

    Returns:
        By format: the errors of ``compare`` over all cases, and ``cases`` one by one;
        ``problem``, a text, where it does not answer as JAX does; ``skipped``, a text, where it was not run.
    """
    return {name: _check_artefact(name, directory, spec, cases, trust) for name in formats}


def format_table(artefacts: Mapping[str, Mapping[str, Any]], directory: Path, *, verbose: bool = False) -> str:
    """Write one line for each artefact: its largest error of an action on the environment's observations, over the
    action's range where that is finite, and of what is allowed on all cases.

    Args:
        directory: of the export.
        verbose: all errors instead, over all outputs, in the environment and on all cases.
    """
    action = parse_json(read_bytes(directory / "contract.json"))["action"]
    bounds = [*(action.get("low") or [None]), *(action.get("high") or [None])]
    ranged = all(type(x) in (int, float) for x in bounds)
    spans = np.subtract(action["high"], action["low"]) if ranged else np.ones(1)
    unit = "of the action's range" if ranged else "in the action's unit"

    def plain(facts: Mapping[str, Any]) -> str:
        error = facts["cases"]["environment"]["action"]["max_abs"] / float(np.min(spans))
        return f"actions differ by at most {error:.1e} {unit}; {facts['of_allowed']:.0%} of what is allowed"

    if not verbose:
        return write_rows(artefacts, plain)

    def row(facts: Mapping[str, Any]) -> str:
        groups = (list(facts["cases"]["environment"].values()), [facts])
        numbers = ([max(errors[key] for errors in group) for key in _COLUMNS] for group in groups)
        texts = ["{:>8.1e} {:>8.1e} {:>9.0f} {:>10.1f}".format(*each) for each in numbers]
        return f"{' '.join(texts)} {facts['of_allowed']:>10.1%}"

    above = f"{'':<17} {'in the environment':^36} {'adversarial too':^36}"
    columns = f" {'abs':>8} {'rel':>8} {'ULP':>9} {'ULP of row':>10}" * 2
    names = f"     {'format':<12}{columns} {'of allowed':>10}"
    return write_rows(artefacts, row, above, names)


def _check_artefact(name: str, directory: Path, spec: Interface, cases: list[Case], trust: bool) -> dict[str, Any]:
    form = FORMATS[name]
    if form.runs_code and not trust:
        return {"file": form.file, "skipped": _NOT_TRUSTED}
    if missing := form.missing():
        return {"file": form.file, "skipped": f"skipped: not installed here; pip install {' '.join(missing)}"}
    contract = load_contract(directory)  # what a caller goes by, such as where choices start
    return {"file": form.file, **measure(lambda: form.load(directory / form.file, spec), cases, contract)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ejax verify",
        description="Verify an exported policy. Start it outside the folder, because Python imports modules from the "
        "working directory.",
        epilog="Exit code: 0 all formats run answer as JAX did and every file has its SHA-256; 1 a file is damaged, "
        "unlisted or deviates; 2 no export, or of another version; 3 nothing was run.",
    )
    parser.add_argument(
        "directory", type=lambda x: Path(x).expanduser(), metavar="DIR", help="folder that ejax export wrote"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also print errors in units in the last place")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also run policy.pt2 and policy.torchscript, which can run their maker's code",
    )
    return parser


if __name__ == "__main__":
    if find_spec("ejax") is None:  # it needs nothing of ejax but an end that a closed pipe does not disturb
        sys.exit(main())
    from ejax.runtime.process_exit import exit_with

    exit_with(main)
