"""``python standalone_verify.py DIR``: check a certified policy by this one file, numpy and onnxruntime.

It implements docs/certificate.md and imports nothing of ejax or interop, which import from it: copy the file alone. The
folder is compared with the lists in its ``parity.json``, and ``policy.onnx`` answers the stored observations. Other
formats are compared by their SHA-256 alone; ``ejax verify`` runs them too.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
RunArtefact: TypeAlias = Callable[[list[NDArray[Any]]], list[NDArray[Any]]]
"""An artefact: the inputs [B, ...] in the contract's order in, its outputs [B, ...] out."""
Interface: TypeAlias = Any
"""A ``Contract``, or a spec of ``interop.twin``. Not ``continuous``: actions are choices, ``sizes`` of a dimension."""

SCHEMA_VERSION, FILE, CONSECUTIVE = 1, "parity.json", "consecutive"
FORMAT_NAMES = ("pt", "safetensors", "pt2", "onnx", "torchscript", "stablehlo")  # of version 1, in policy.NAME each
BATCH_SIZES = (1, 2, 7, 1024)
MEMORY, NEXT_MEMORY = "memory", "next_memory"  # input and output of a policy with memory
MAX_BYTES, MAX_ARTEFACT = 64 << 20, 8 << 30  # of a file of facts; of weights, of a graph, of arrays once unpacked
LEAPP_FILES = ("leapp.onnx", "leapp.yaml", "leapp_initial_values.safetensors")
_SOMETIMES = ("policy.json", "episode.json", "tokenizer.json", "texts.json", "minilm.npz", "loader.zip", *LEAPP_FILES)
_DTYPES = {"observation": ("f4", "u1", "i4"), "expected": ("f4", "i4", "i8"), "allowed": ("f4", "f8")}
_ROW = "off by at most {max_abs:.1e}, {of_allowed:.1%} of what is allowed"
_AGAIN = "make the export again: ejax export RUN --to DIR"


class ParityError(RuntimeError):
    """An artefact that does not answer as certified, or files that are not those of the certificate."""


@dataclass(frozen=True)
class Contract:
    """The interface that a ``contract.json`` states, and the most steps of an episode, None where there is no limit."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_shape: Callable[[str], tuple[int, ...]]
    output_shape: Callable[[str], tuple[int, ...]]
    continuous: bool
    sizes: tuple[int, ...]
    start: tuple[int, ...]
    max_episode_steps: int | None


@dataclass(frozen=True)
class Case:
    """Observations of one kind, and the certified answers to them."""

    name: str
    observation: Arrays  # the inputs: [B, F] float32 each, images [B, height, width, channels] uint8
    expected: Arrays  # the outputs: [B, ...]
    allowed: Arrays  # for each floating-point output: [B, 1], the largest absolute error that passes

    def limit(self, name: str) -> NDArray[np.float64]:
        """Return what is allowed, at most 2⁻¹⁰ of max(1, ‖y‖∞, ‖x‖∞/16), which no file can widen: [B, 1]."""
        rows = [self.expected[name], *(x / 16.0 for x in self.observation.values() if x.dtype.kind == "f")]
        finite = [np.where(np.isfinite(x), x, 0.0).reshape(len(x), -1) for x in rows]
        return np.fmin(self.allowed[name], 2.0**-10 * np.max([largest_magnitude(x) for x in finite], axis=0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Check a certified policy. Run it from outside the folder: Python imports what lies next to it.",
        epilog="Exit code: 0 as certified; 1 a file changed or deviates; 2 it cannot be checked; 3 nothing was run.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="holds parity.json and the files that it lists")
    directory: Path = parser.parse_args(argv).directory.expanduser()
    return print_verdict("standalone_verify", directory, lambda: verify_onnx(directory), write_rows)


def print_verdict(program: str, directory: Path, check: Callable[[], Any], table: Callable[[Any], str]) -> int:
    """Print what ``check`` finds. Returns the exit code of ``--help``."""
    try:
        artefacts = check()
    except Exception as error:  # a stranger's file may fail anywhere
        text = (str(error) if isinstance(error, ParityError | OSError | ValueError) else "") or repr(error)[:500]
        deviates = isinstance(error, ParityError)  # whose text has lines, and is printable
        print("FAIL" if deviates else "FAIL: it cannot be checked")
        print(f"{program}: {text if deviates else printable(text)}", file=sys.stderr)
        return 1 if deviates else 2
    print(table(artefacts))
    print(f"{printable(str(directory / FILE))}  sha256 {sha256(directory / FILE)}")
    not_run = [name for name, facts in artefacts.items() if "skipped" in facts]
    if len(not_run) == len(artefacts):
        print(f"{program}: the files are those of the export, but no artefact was run", file=sys.stderr)
        return 3
    if not_run:
        print(f"not run, compared by SHA-256 alone: {', '.join(not_run)}")
    return 0


def printable(text: str) -> str:
    """Escape what moves a terminal's cursor, turns its direction or begins a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def write_rows(artefacts: Mapping[str, Any], row: Callable[[Any], str] = _ROW.format_map, *header: str) -> str:
    """Write PASS, or FAIL where nothing was run, the header, and a line for each artefact."""
    run = [name for name, facts in artefacts.items() if "skipped" not in facts]
    first = f"{'PASS' if run else 'FAIL'}: {len(run)} of {len(artefacts)} formats were run and answer as certified"
    texts = {name: row(facts) if name in run else facts["skipped"] for name, facts in artefacts.items()}
    lines = [f"{'PASS' if name in run else '----'} {name:<12} {text}" for name, text in texts.items()]
    return "\n".join([first, *header, *lines])


def verify_onnx(directory: Path) -> dict[str, dict[str, Any]]:
    """Check lists, hashes, contract and episode, then ``policy.onnx`` on all cases; as ``interop.verify.verify``."""
    check_files(directory, report := read_certificate(directory))
    contract, cases = load_contract(directory), load_cases(directory / "observations.npz")
    check_cases(cases, contract, report["rows"])
    check_episode_file(directory, contract)
    listed = [*report["artefacts"], *({"leapp.yaml"} & report["sha256"].keys())]
    artefacts: dict[str, Any] = {x: {"skipped": "not verified: this program runs policy.onnx alone"} for x in listed}
    if "onnx" in artefacts and importlib.util.find_spec("onnxruntime") is None:
        artefacts["onnx"]["skipped"] = "skipped: not installed here; pip install onnxruntime"
    elif "onnx" in artefacts:
        found = measure(lambda: load_onnx(directory / "policy.onnx", contract), cases, contract)
        artefacts["onnx"] = {"file": "policy.onnx", **found}
    raise_on_problems(artefacts)
    return artefacts


def load_onnx(path: Path, interface: Interface) -> RunArtefact:
    run = open_session(path).run
    return lambda leaves: run(list(interface.outputs), dict(zip(interface.inputs, leaves, strict=True)))


def open_session(file: Path) -> Any:
    """Open a model in ONNX Runtime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors: it warns of an input that may be left out
    options.add_session_config_entry("session.load_model_format", "ONNX")  # what was read, and no other format of its
    return onnxruntime.InferenceSession(read_graph(file), options, providers=["CPUExecutionProvider"])


def read_graph(file: Path) -> bytes:
    """Read a model of ONNX. ParityError: some of its tensors are in other files, which have no digest."""
    content = read_bytes(file, MAX_ARTEFACT)
    left = [memoryview(content)] if b"location" in content else []
    while left:
        parts = _parts(left.pop())
        if any(field == 13 and (1, b"location") in _parts(part) for field, part in parts):
            raise ParityError("it has external data: tensors in other files, which have no SHA-256")
        left += [part for _, part in parts]
    return content


def _parts(message: memoryview) -> list[tuple[int, memoryview]]:
    """List ``(field, content)`` of a message of protobuf, but for its numbers; nothing where it is none."""
    parts, at = [], 0
    try:
        while at < len(message):
            tag, at = _varint(message, at)
            wire = tag & 7
            size, at = _varint(message, at) if wire in (0, 2) and tag > 7 else ({1: 8, 3: 0, 4: 0, 5: 4}[wire], at)
            parts += [((tag & 0xFFFFFFFF) >> 3, message[at : at + size])] if wire == 2 else []
            at += size if wire else 0
    except (IndexError, KeyError):
        return []
    return parts


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    end = next((i for i in range(at, at + 9) if message[i] < 128), at + 9) + 1
    return sum((x & 127) << 7 * i for i, x in enumerate(message[at:end])), end


def read_certificate(directory: Path) -> dict[str, Any]:
    """Read ``parity.json``. Raises FileNotFoundError, and ValueError where it is of another schema."""
    return _read_facts(directory / FILE, _KEYS)


def load_contract(directory: Path) -> Contract:
    """Read the interface from ``contract.json``. Raises FileNotFoundError, and ValueError: of another schema."""
    file = directory / "contract.json"
    facts = _read_facts(file, _CONTRACT_KEYS)
    entries = (facts["observation"], facts["outputs"])
    given, returned = ({entry["name"]: tuple(entry["shape"][1:]) for entry in part} for part in entries)
    if "action" not in returned or [len(given), len(returned)] != [len(part) for part in entries]:
        raise ValueError(f"{file}: 'outputs' must have an action, and no name may be there twice; {_AGAIN}")
    continuous = next(entry["dtype"] for entry in entries[1] if entry["name"] == "action") == "float32"
    sizes = tuple(facts["action"].get("num_choices", ()))
    start = tuple(facts["action"].get("start", ())) if "shape" in facts["action"] else ()  # of older ones: from 0
    if not continuous and (not sizes or returned.get("logits") != (sum(sizes),)):
        raise ValueError(f"{file}: actions are choices, so 'num_choices' and as many 'logits' are needed; {_AGAIN}")
    if (MEMORY in given or NEXT_MEMORY in returned) and given.get(MEMORY) != returned.get(NEXT_MEMORY):
        raise ValueError(f"{file}: the input {MEMORY} needs an output {NEXT_MEMORY} of its shape; {_AGAIN}")
    forms = (tuple(given), tuple(returned), given.__getitem__, returned.__getitem__)
    return Contract(*forms, continuous, sizes, start, facts["env"].get("max_episode_steps"))


def check_episode_file(directory: Path, contract: Contract) -> None:
    """Refuse an ``episode.json`` without start, return and length, or longer than the contract's episodes are."""
    file, limit = directory / "episode.json", contract.max_episode_steps
    length = _read_facts(file, _EPISODE_KEYS)["result"]["length"] if file.exists() else 0
    if limit is not None and length > limit:
        raise ValueError(f"{file}: the length {length} is above max_episode_steps of contract.json; {_AGAIN}")


def check_files(directory: Path, report: Mapping[str, Any]) -> None:
    """Refuse a folder with files that are missing, changed, or not listed: a ParityError that names them all."""
    artefacts, digests = {f"policy.{name}" for name in report["artefacts"]}, report["sha256"]
    allowed = {"policy.json", *artefacts}
    present = {name for name in _SOMETIMES if os.path.lexists(directory / name)}
    needed = {"contract.json", "observations.npz", *artefacts, *present} - digests.keys()
    changed = {x for x, digest in digests.items() if not (directory / x).is_file() or sha256(directory / x) != digest}
    problems = {
        "missing or changed since the export: {}": changed,
        FILE + " has no SHA-256 of {}": needed,
        FILE + " does not list {} under artefacts": {x.name for x in directory.glob("policy.*")} - allowed,
    }
    if texts := [text.format(printable(", ".join(sorted(names)))) for text, names in problems.items() if names]:
        why = "The folder was changed, or an older ejax made it: remove what does not belong to the export, or"
        raise ParityError(f"{'; '.join(texts)}. {why} {_AGAIN}")


def sha256(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure(load: Callable[[], RunArtefact], cases: list[Case], interface: Interface) -> dict[str, Any]:
    """Run an artefact: errors of ``compare`` over all cases, ``cases`` one by one; or ``problem``, a text."""
    try:
        run = load()
        by_case = {case.name: compare(run, case, interface) for case in cases}
        leaves = [cases[0].observation[name] for name in interface.inputs]
        first, second = ([np.asarray(y).tobytes() for y in run(leaves)] for _ in range(2))  # NaN is not equal to itself
        if first != second:
            return {"problem": f"the same rows of '{cases[0].name}' gave other bits the second time"}
    except Exception as error:  # an invalid artefact may fail anywhere in its library
        text = "it cannot be loaded and run: "
        return {"problem": str(error) if isinstance(error, ParityError) else f"{text}{repr(error)[:500]}"}
    every = [errors for outputs in by_case.values() for errors in outputs.values()]
    facts: dict[str, Any] = {key: max(errors[key] for errors in every) for key in every[0]}
    beyond = [
        f"{output} of '{case}' is off by {errors['max_abs']:.3g}, {errors['of_allowed']:.3g} times what is allowed"
        for case, outputs in by_case.items()
        for output, errors in outputs.items()
        if not errors["of_allowed"] <= 1.0
    ]
    return facts | ({"problem": "; ".join(beyond)} if beyond else {}) | {"cases": by_case}


def raise_on_problems(artefacts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a ParityError where an artefact has a problem, with a line for each that was run."""
    run = {name: facts.get("problem") for name, facts in artefacts.items() if "skipped" not in facts}
    if any(run.values()):
        lines = [f"  FAIL {name}: {printable(text)}" if text else f"  PASS {name}" for name, text in run.items()]
        raise ParityError("\n".join(["not the policy that was certified:", *lines]))


def compare(run: RunArtefact, case: Case, interface: Interface) -> dict[str, dict[str, float]]:
    """Measure the largest errors of each output over all rows, in one batch and in batches of ``BATCH_SIZES``.

    ULP: how many float32 numbers apart. Tiny numbers lie dense, so ``max_row_ulp`` counts in the spacing at max(1, the
    row's largest magnitude). ``of_allowed`` above 1 is a mismatch; other shapes, dtypes or NaNs are a ParityError.
    """
    worst: dict[str, dict[str, float]] = {}
    loop, every = case.name == CONSECUTIVE, len(case.expected["action"])
    for rows in [every, *(size for size in BATCH_SIZES if size < every and not loop)]:
        leaves = [case.observation[name][:rows] for name in interface.inputs]
        answers = _answer_consecutively(run, case, interface) if loop else run(leaves)
        if len(answers) != len(interface.outputs):
            raise ParityError(f"{len(answers)} outputs where {interface.outputs} were expected")
        for name, answer in zip(interface.outputs, answers, strict=True):
            errors = _errors(name, np.asarray(answer), case, rows, interface)
            worst[name] = {key: max(value, worst.get(name, errors)[key]) for key, value in errors.items()}
    return worst


def _answer_consecutively(run: RunArtefact, case: Case, interface: Interface) -> list[NDArray[Any]]:
    memory, answers = case.observation[MEMORY][:1], []
    for t in range(len(case.expected["action"])):
        memory = memory if case.observation[MEMORY][t].any() else np.zeros_like(memory)  # where an episode starts
        row = {name: case.observation[name][t : t + 1] for name in interface.inputs} | {MEMORY: memory}
        answers.append([np.asarray(y) for y in run([row[name] for name in interface.inputs])])
        memory = answers[-1][interface.outputs.index(NEXT_MEMORY)]
    return [np.concatenate(each) for each in zip(*answers, strict=True)]


def load_cases(path: Path) -> list[Case]:
    """Load ``observations.npz``. Raises ValueError where it is another file, or a damaged one."""
    parts: dict[str, dict[str, Arrays]] = {}
    try:
        check_plain(path)
        with np.load(path, allow_pickle=False) as file:
            if (size := sum(x.file_size for x in file.zip.infolist())) > MAX_ARTEFACT:
                raise ValueError(f"unpacked it has {size} bytes; at most {MAX_ARTEFACT} are read")
            for key in file.files:
                (case, kind, name), x = key.split("/", 2), file[key]
                if x.ndim == 0 or x.dtype not in map(np.dtype, _DTYPES[kind]):
                    raise ValueError(f"{key} is {x.dtype}{list(x.shape)}; must be {' or '.join(_DTYPES[kind])}")
                parts.setdefault(case, {}).setdefault(kind, {})[name] = x
        return [Case(name, **arrays) for name, arrays in parts.items()]
    except Exception as error:  # an invalid archive may fail in zipfile, NumPy or here
        raise ValueError(f"{path} does not hold an export's observations: {repr(error)[:200]}") from error


def check_cases(cases: list[Case], interface: Interface, rows: Mapping[str, int]) -> None:
    """Refuse by a ValueError cases that an artefact could not fail, or of other rows, names or shapes than stated."""
    if {case.name: len(case.expected.get("action", ())) for case in cases} != rows or "environment" not in rows:
        raise ValueError(f"observations.npz does not have the cases and rows that parity.json lists: {rows}")
    for case in cases:
        batch = (rows[case.name],)
        wanted = {f"observation/{name}": (*batch, *interface.input_shape(name)) for name in interface.inputs}
        wanted |= {f"expected/{name}": (*batch, *interface.output_shape(name)) for name in interface.outputs}
        numbers = (name for name in interface.outputs if interface.continuous or name != "action")
        wanted |= {f"allowed/{name}": (*batch, 1) for name in numbers}
        given = {f"{kind}/{name}": x.shape for kind in _DTYPES for name, x in getattr(case, kind).items()}
        if given != wanted:
            names = sorted(name for name in given.keys() | wanted.keys() if given.get(name) != wanted.get(name))
            shown = ", ".join(f"{name} is {given.get(name)}, must be {wanted.get(name)}" for name in names)
            raise ValueError(f"observations.npz: in case '{case.name}' {shown}")
        for name, x in case.allowed.items():
            overflows = ~np.isfinite(case.expected[name].reshape(len(x), -1)).all(axis=-1, keepdims=True)
            if not ((x > 0) & (overflows | (x <= 2.0**14 * case.limit(name)))).all():
                raise ValueError(
                    f"observations.npz: allowed/{name} of '{case.name}' must be finite, above 0, and small"
                )


def _errors(name: str, answer: NDArray[Any], case: Case, rows: int, interface: Interface) -> dict[str, float]:
    expected = case.expected[name][:rows]
    given, wanted = (f"{x.dtype}{list(x.shape)}" for x in (answer, expected))
    if given != wanted:
        raise ParityError(f"{name} is {given} in a batch of {rows}, the certificate has {wanted}")
    if name == "action" and not interface.continuous:  # by how much the chosen logit is below the best one
        logits, limit, regret = case.expected["logits"][:rows], 2.0 * case.limit("logits")[:rows, 0], np.zeros(rows)
        parts = np.split(logits, np.cumsum(interface.sizes)[:-1], axis=-1)
        for part, choice in zip(parts, (answer.reshape(rows, -1) - np.array(interface.start or 0)).T, strict=True):
            chosen = np.take_along_axis(part, np.clip(choice, 0, part.shape[-1] - 1)[:, None], axis=-1)[:, 0]
            inside = (choice >= 0) & (choice < part.shape[-1])
            regret = np.maximum(regret, np.where(inside, part.max(axis=-1) - chosen, np.inf))
        difference, scale = np.abs(answer.astype(np.int64) - expected), largest_magnitude(logits)[..., 0]
        return _largest(difference, regret / scale, difference, regret / np.spacing(np.float32(scale)), regret / limit)
    answer, expected = answer.reshape(rows, -1), expected.reshape(rows, -1)
    # infinities must be the same ones; no distance is taken between them
    infinite = np.isinf(answer) | np.isinf(expected)
    unlike = (np.isnan(answer) != np.isnan(expected)) | (infinite & (answer != expected))
    if unlike.any():
        row = int(np.argwhere(unlike)[0][0])
        raise ParityError(f"{name} is {answer[row]} in row {row} of '{case.name}', the certificate has {expected[row]}")
    error = np.abs(answer.astype(np.float64) - np.where(infinite, np.nan, expected))
    relative = error / np.maximum(np.abs(expected), np.finfo(np.float32).tiny)
    spacing = np.spacing(np.float32(largest_magnitude(expected)))
    bits = (np.ascontiguousarray(x).view(np.int32).astype(np.int64) for x in (answer, expected))
    # places among all float32, in order: they count ULPs
    ours, theirs = (np.where(x < 0, -(2**31) - x, x) for x in bits)
    steps = np.where(np.isnan(error), np.nan, np.abs(ours - theirs))
    return _largest(error, relative, steps, error / spacing, error / case.limit(name)[:rows])


def largest_magnitude(expected: NDArray[Any]) -> NDArray[np.float64]:
    """Return the row's largest magnitude, at least 1: [B, 1]."""
    return np.fmax.reduce(np.abs(expected.astype(np.float64)), axis=-1, keepdims=True, initial=1.0)


def _largest(*errors: NDArray[Any]) -> dict[str, float]:
    names = ("max_abs", "max_rel", "max_ulp", "max_row_ulp", "of_allowed")
    return {name: float(np.fmax.reduce(x, axis=None, initial=0.0)) for name, x in zip(names, errors, strict=True)}


def check_plain(path: Path, most: int = MAX_ARTEFACT) -> None:
    """Refuse what is not a regular file, or too large, before a library opens it: FileNotFoundError, ValueError."""
    if not path.exists():
        made = "ejax export RUN --to DIR has written, with this format among its --formats"
        raise FileNotFoundError(f"there is no {path}: use a folder that {made}")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size} bytes; at most {most} are read")


def open_plain(path: Path, most: int = MAX_ARTEFACT) -> BufferedReader:
    """Open a regular file of bounded size; as ``check_plain``."""
    check_plain(path, most)
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of bounded size; as ``check_plain``."""
    with open_plain(path, most) as file:
        return file.read(most)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, and refuse by a ValueError what would exhaust the stack of whoever reads it."""
    try:
        level = [found := json.loads(text)]
        for _ in range(100):
            parts = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
            level = [x for part in parts for x in part]
    except RecursionError:
        level = [text]
    if level:
        raise ValueError("it is nested deeper than 100 levels")
    return found


def _read_facts(file: Path, keys: Mapping[str, tuple[str, Callable[[Any], bool]]]) -> dict[str, Any]:
    try:
        facts = parse_json(read_bytes(file))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON of bounded size ({repr(error)[:200]}); {_AGAIN}") from error
    if not isinstance(facts, dict):
        raise ValueError(f"{file}: must be a mapping, got a {type(facts).__name__}; {_AGAIN}")
    for key, (wanted, holds) in keys.items():
        if key not in facts or not holds(facts[key]):
            given = json.dumps(facts[key])[:120] if key in facts else "nothing"
            raise ValueError(f"{file}: '{key}' must be {wanted}, got {given}; {_AGAIN}")
    return facts


def _is_count(x: Any) -> bool:
    return type(x) is int and x > 0


def _mapping_of(holds: Callable[[str, Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, dict) and len(x) > 0 and all(holds(name, value) for name, value in x.items())


def _is_digest(name: str, digest: Any) -> bool:
    plain = Path(name).name == name and name not in ("", ".", "..") and name.isprintable()
    return plain and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None


def _are_entries(*dtypes: str) -> Callable[[Any], bool]:
    def is_entry(x: Any) -> bool:
        name, shape = (x.get("name"), x.get("shape")) if isinstance(x, dict) else (None, None)
        is_named = isinstance(name, str) and name.isprintable() and name
        is_shaped = isinstance(shape, list) and shape[:1] == ["batch"] and all(map(_is_count, shape[1:]))
        return bool(is_named and is_shaped) and x.get("dtype") in dtypes

    return lambda x: isinstance(x, list) and len(x) > 0 and all(map(is_entry, x))


def _is_action(x: Any) -> bool:
    sizes = x.get("num_choices", [1]) if isinstance(x, dict) else None
    return isinstance(sizes, list) and len(sizes) > 0 and all(map(_is_count, sizes)) and "head" in x


def _is_result(x: Any) -> bool:
    numbers: list[Any] = [x.get("return"), x.get("length")] if isinstance(x, dict) else [None]
    return all(type(n) in (int, float) and abs(n) < 2**63 for n in numbers) and numbers[-1] == numbers[-1] // 1 > 0


_VERSION = {"schema_version": (str(SCHEMA_VERSION), lambda x: type(x) is int and x == SCHEMA_VERSION)}
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **_VERSION,
    **dict.fromkeys(("checkpoint", "clipping"), ("text", lambda x: isinstance(x, str))),
    "global_step": ("an integer", lambda x: type(x) is int),
    "rows": ("a mapping of cases to their number of rows", _mapping_of(lambda x, n: x.isprintable() and _is_count(n))),
    "largest_allowed": ("a mapping of cases", _mapping_of(lambda _, largest: isinstance(largest, dict))),
    "versions": ("a mapping of libraries", _mapping_of(lambda _, version: isinstance(version, str))),
    "artefacts": (
        f"a mapping that is not empty, of {', '.join(FORMAT_NAMES)}, each with its 'file'",
        _mapping_of(lambda name, x: name in FORMAT_NAMES and isinstance(x, dict) and x.get("file") == f"policy.{name}"),
    ),
    "sha256": ("a mapping that is not empty, of the folder's files to 64 hexadecimal digits", _mapping_of(_is_digest)),
}
_ENTRIES = "a list of inputs or outputs with a 'name', a 'shape' that begins with \"batch\" and a 'dtype' of"
_CONTRACT_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **_VERSION,
    "env": (
        "a mapping, with max_episode_steps a count or null",
        lambda x: isinstance(x, dict) and (x.get("max_episode_steps") is None or _is_count(x["max_episode_steps"])),
    ),
    "observation": (f"{_ENTRIES} float32, uint8, int32", _are_entries("float32", "uint8", "int32")),
    "outputs": (f"{_ENTRIES} float32, int32, int64", _are_entries("float32", "int32", "int64")),
    "action": ("a mapping with a 'head', and of choices their 'num_choices'", _is_action),
}
_EPISODE_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **_VERSION,
    "seed": ("an integer", lambda x: type(x) is int),
    "start": ("a mapping of the environment's state", _mapping_of(lambda *_: True)),
    "result": ("a mapping with a finite 'return' and a 'length' in whole steps", _is_result),
}


if __name__ == "__main__":
    sys.exit(main())
