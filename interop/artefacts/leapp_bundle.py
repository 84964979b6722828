"""A LEAPP bundle next to ``policy.onnx``, for runtimes of robots such as Isaac ROS Deploy; in the form of leapp 0.7.2.

``leapp.onnx`` is the policy for one row, ``leapp.yaml`` describes it. A runtime wires inputs by their ``kind``, so
numbers are taken apart by their names: "elbow angle", "wrist_1 angle" are the elements elbow and wrist_1 of ``angle``,
"goal x", "goal y" are x and y of ``goal``. Only what is certain to be of a kind has one. An action has none: it is what
the environment takes, by ``features`` scaled or added to a position, and ``drive_mode`` is that of its unit.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interop.standalone_verify import (
    LEAPP_FILES,
    MEMORY,
    NEXT_MEMORY,
    Arrays,
    ParityError,
    RunArtefact,
    open_session,
    parse_json,
    read_bytes,
    read_graph,
)
from interop.twin.spec import PolicySpec

MODEL, _DESCRIPTION, _INITIAL_VALUES = LEAPP_FILES
_NODE = "policy"
_WORD = re.compile(r"[^\s{}\[\],-][^\s{}\[\],]*")
_OF_ELEMENT = re.compile(
    r"(?P<quantity>.+) (?P<axis>[xyzw])"
    r"|(?P<element>.+?) (?P<of_element>((previous|last|target|measured) )?\w+( change| − home)?)"
)
_KINDS = {
    ("angle", "rad"): "state/joint/position",
    ("position", "rad"): "state/joint/position",
    ("velocity", "rad/s"): "state/joint/velocity",
}
_DRIVE_MODES = {
    "rad": "position",
    "m": "position",
    "rad/s": "velocity",
    "m/s": "velocity",
    "N": "effort",
    "N m": "effort",
}


def write_bundle(folder: Path, spec: Any, versions: Mapping[str, str]) -> None:
    """Write the bundle into a folder with ``contract.json`` and ``policy.onnx``; ``versions``: of libraries."""
    model = _one_row(read_graph(folder / "policy.onnx"), _contract(folder)["observation"])
    (folder / MODEL).write_bytes(model)
    for name, content in _beside_model(folder, spec, versions).items():
        (folder / name).write_bytes(content)


def check_description(folder: Path, spec: Any, versions: Mapping[str, str]) -> None:
    """Refuse a bundle that is not, byte by byte, as ``write_bundle`` makes it of ``contract.json`` and ``leapp.onnx``.

    A runtime runs what ``leapp.yaml`` names, by the loader that it names, and some of those run code.

    Raises ParityError: the text names the file, and the first words that differ.
    """
    if links := [name for name in LEAPP_FILES if (folder / name).is_symlink()]:
        raise ParityError(f"{', '.join(links)} must be a file of the folder, not a link")
    for name, wanted in _beside_model(folder, spec, versions).items():
        found = read_bytes(folder / name)
        if found != wanted:
            pairs = (_WORD.findall(x[: 2 * len(wanted)].decode("latin-1")) for x in (found, wanted))
            words = list(zip_longest(*pairs, fillvalue="nothing"))
            at = next((i for i, (has, needs) in enumerate(words) if has != needs), 0)
            has, needs = (" ".join(each)[:200] for each in zip(*words[max(at - 1, 0) : at + 2], strict=True))
            raise ParityError(f"{name} is not of this contract.json and {MODEL}: it has {has!r}, not {needs!r}")


def _beside_model(folder: Path, spec: Any, versions: Mapping[str, str]) -> dict[str, bytes]:
    """Make the files next to the model, from the model and ``contract.json``."""
    import yaml

    contract, model = _contract(folder), read_graph(folder / MODEL)
    normalized = not isinstance(spec, PolicySpec) or spec.actor.normalized
    terms = [term for entry in contract["observation"] for term in input_terms(entry)]
    external = [term for term in terms if term["name"] != MEMORY]
    for term in external:
        term["normalization"] = "in the model: pass raw values" if normalized else "none"
    rate, memory = contract["control_rate_hz"], next((x for x in terms if x["name"] == MEMORY), None)
    pipeline: dict[str, Any] = {
        "configs": {
            **({} if rate is None else {"frequency": rate}),
            "environment": contract["env"],
            "certificate": "parity.json: the SHA-256 of these files, and the largest errors of leapp.onnx",
        },
        "data_flow": {},
        "feedback_flow": {f"{_NODE}/{NEXT_MEMORY}": [f"{_NODE}/{MEMORY}"]} if memory else {},
        "inputs": {_NODE: [term["name"] for term in external]},
        "outputs": {_NODE: ["action"]},
    }
    files = {}
    if memory:
        size = 4 * memory["shape"][1]
        header = {"dtype": "F32", "shape": memory["shape"], "data_offsets": [0, size]}
        begin = json.dumps({f"{_NODE}/{MEMORY}": header}).encode()
        files[_INITIAL_VALUES] = len(begin).to_bytes(8, "little") + begin + bytes(size)
        pipeline["initial_values"] = _INITIAL_VALUES
    outputs = [_output(x, contract["action"]) for x in contract["outputs"] if x["name"] in ("action", NEXT_MEMORY)]
    parameters = {
        "model_path": MODEL,
        "md5sum": hashlib.md5(model, usedforsecurity=False).hexdigest(),
        "sha256sum": hashlib.sha256(model).hexdigest(),
        "backend": "onnx",
    }
    description = {
        "models": {_NODE: {"inputs": terms, "outputs": outputs, "parameters": parameters}},
        "pipeline": pipeline,
        "system information": {"leapp config version": "1.3", **versions},
    }
    text = yaml.safe_dump(description, sort_keys=False, default_flow_style=None, width=120)
    return {_DESCRIPTION: text.encode(), **files}


def input_terms(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Take an input of the contract apart, in order: a term for each run of numbers of one quantity and unit."""
    whole = {"name": entry["name"], "dtype": entry["dtype"], "shape": [1, *entry["shape"][1:]], "type": "tensor"}
    if not entry.get("features"):
        return [whole | {key: entry[key] for key in ("meaning", "low", "high") if key in entry}]
    terms: list[dict[str, Any]] = []
    start, seen = 0, set()
    for (quantity, unit), run in groupby(entry["features"], key=lambda x: (_split(x["name"])[0], x["unit"])):
        names = [x["name"] for x in run]
        end = start + len(names)
        word = "_".join(re.findall(r"\w+", quantity)) + (f"_{start}" if quantity in seen else "")
        term = {
            "name": f"{entry['name']}.{word}",
            "shape": [1, len(names)],
            "element_names": [[_split(name)[1] for name in names]],
            "features": names,
            "units": unit,
            "low": entry["low"][start:end],
            "high": entry["high"][start:end],
        }
        terms.append({**whole, **term, **({"kind": _KINDS[quantity, unit]} if (quantity, unit) in _KINDS else {})})
        seen.add(quantity)
        start = end
    return terms


def load_bundle(folder: Path, spec: Any, versions: Mapping[str, str]) -> RunArtefact:
    """Load the bundle as a function of the contract's inputs, answered row by row by ONNX Runtime: leapp's own
    InferenceManager would load what ``leapp.yaml`` names. ParityError: as ``check_description``, before that."""
    check_description(folder, spec, versions)
    groups = [input_terms(entry) for entry in _contract(folder)["observation"]]
    session = open_session(folder / MODEL)

    def run(leaves: list[NDArray[Any]]) -> list[NDArray[Any]]:
        fed: Arrays = {}
        for group, leaf in zip(groups, leaves, strict=True):
            ends = np.cumsum([term["shape"][-1] for term in group])
            parts = np.split(leaf, ends[:-1], axis=-1)
            fed |= {term["name"]: part for term, part in zip(group, parts, strict=True)}
        rows = [session.run(None, {name: x[i : i + 1] for name, x in fed.items()}) for i in range(len(leaves[0]))]
        return [np.concatenate(each) for each in zip(*rows, strict=True)]

    return run


def _contract(folder: Path) -> Any:
    return parse_json(read_bytes(folder / "contract.json"))


def _one_row(policy: bytes, observation: list[dict[str, Any]]) -> bytes:
    """Make ``leapp.onnx`` of ``policy.onnx``: its inputs taken apart, without the outputs that no robot needs."""
    import onnx
    from onnx import helper

    model = onnx.load_from_string(policy)
    graph = model.graph
    inputs, joins = [], []
    for entry in observation:
        terms, kind = input_terms(entry), helper.np_dtype_to_tensor_dtype(np.dtype(entry["dtype"]))
        inputs += [helper.make_tensor_value_info(term["name"], kind, term["shape"]) for term in terms]
        if (names := [term["name"] for term in terms]) != [entry["name"]]:
            joins.append(helper.make_node("Concat", names, [entry["name"]], axis=-1))
    outputs = [value for value in graph.output if value.name in ("action", NEXT_MEMORY)]
    for value in outputs:
        value.type.tensor_type.shape.dim[0].dim_value = 1
    for field, made in (("input", inputs), ("output", outputs), ("node", [*joins, *graph.node])):
        graph.ClearField(field)
        getattr(graph, field).extend(made)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _output(entry: Mapping[str, Any], action: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the action, with its limits and drive modes, or the memory."""
    output = {"name": entry["name"], "dtype": entry["dtype"], "shape": [1, *entry["shape"][1:]], "type": "tensor"}
    if entry["name"] != "action":
        return output
    output |= {key: action[key] for key in ("low", "high", "num_choices", "start", "chunk", "clipped") if key in action}
    if not action["features"]:
        return output
    features = [(*_split(x["name"]), x["unit"]) for x in action["features"]]
    modes = [(_DRIVE_MODES.get(unit, "unknown"), quantity.endswith(" change")) for quantity, _, unit in features]
    return output | {
        "element_names": [[element for _, element, _ in features]],
        "features": [x["name"] for x in action["features"]],
        "units": [unit for *_, unit in features],
        "drive_mode": [f"{mode} change" if is_change else mode for mode, is_change in modes],
    }


def _split(name: str) -> tuple[str, str]:
    """Split the name of a number into ``(quantity, element)``, without the part that says how it is scaled."""
    name = name.partition(" / ")[0].partition(", ")[0]
    match = _OF_ELEMENT.fullmatch(name)
    if match is None:
        return name, name
    return (match["quantity"], match["axis"]) if match["axis"] else (match["of_element"], match["element"])
