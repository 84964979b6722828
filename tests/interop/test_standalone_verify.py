"""The certificate as a standard: its schemas, and the verifier that is one file."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_policies import ORIGIN, policy_for

from ejax.envs.tasks.point_mass import PointMassRL
from interop import standalone_verify
from interop.export import export_policy
from interop.verify import main as verify_main

for package in ("torch", "onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package, reason="needs pip install -e '.[export]'")

VERIFIER = Path(standalone_verify.__file__)
SCHEMAS = VERIFIER.with_name("schemas")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    env = PointMassRL()
    policy, params = policy_for(env)
    directory = tmp_path_factory.mktemp("export") / "exported"
    export_policy(policy, params, env, directory, ["onnx", "pt"], origin=ORIGIN, seed=0)
    return directory


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def change(folder: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a file of facts, under a new digest."""
    facts = json.loads((folder / name).read_text())
    edit(facts)
    (folder / name).write_text(json.dumps(facts))
    if name != "parity.json":
        digest = standalone_verify.sha256(folder / name)
        change(folder, "parity.json", lambda report: report["sha256"].update({name: digest}))


def test_the_file_alone_verifies_an_export(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copy(VERIFIER, tmp_path / "copied_verify.py")
    assert len(VERIFIER.read_text().splitlines()) < 500
    blocked = "import runpy, sys; sys.modules.update(dict.fromkeys(('ejax', 'interop', 'jax', 'torch', 'onnx'))); "
    code = f"{blocked}sys.argv[1:] = [{str(folder)!r}]; runpy.run_path({str(copied)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "of what is allowed" in done.stdout
    assert standalone_verify.sha256(folder / "parity.json") in done.stdout
    assert "not run, compared by SHA-256 alone: pt" in done.stdout


@pytest.mark.parametrize(
    ("name", "edit", "code"),
    [
        ("parity.json", lambda x: x.pop("rows"), 2),
        ("parity.json", lambda x: x.update(schema_version=2), 2),
        ("parity.json", lambda x: x["sha256"].update({"contract.json": "0" * 64}), 1),
        ("parity.json", lambda x: x["sha256"].pop("policy.json"), 1),
        ("parity.json", lambda x: x["artefacts"].pop("pt"), 1),
        ("contract.json", lambda x: x["observation"][0].update(shape=["batch", 3]), 2),
        ("contract.json", lambda x: x["observation"][0].update(shape=[1, 14]), 2),
        ("contract.json", lambda x: x["observation"].append(x["observation"][0]), 2),
        ("contract.json", lambda x: x["outputs"].pop(0), 2),
        ("contract.json", lambda x: x["outputs"][0].update(dtype="int32"), 2),
        ("contract.json", lambda x: x.update(schema_version=2), 2),
        ("contract.json", lambda x: x["env"].update(max_episode_steps=1), 2),
        ("episode.json", lambda x: x.pop("start"), 2),
        ("episode.json", lambda x: x["result"].pop("return"), 2),
        ("episode.json", lambda x: x["result"].update({"return": float("nan")}), 2),
        *(
            ("episode.json", lambda x, length=length: x["result"].update(length=length), 2)
            for length in (0, -1, 1.5, float("nan"), float("inf"), True, "3", None, [3])
        ),
        ("contract.json", lambda x: x["env"].update(max_episode_steps=-1), 2),
        ("contract.json", lambda x: x["env"].update(max_episode_steps=float("inf")), 2),
    ],
)
def test_both_verifiers_have_the_same_verdict(name: str, edit: Any, code: int, folder: Path) -> None:
    change(folder, name, edit)
    assert standalone_verify.main([str(folder)]) == code
    assert verify_main([str(folder)]) == code


def change_arrays(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the observations, under a new digest."""
    with np.load(folder / "observations.npz") as file:
        arrays = dict(file)
    edit(arrays)
    np.savez(folder / "observations.npz", **arrays)
    digest = standalone_verify.sha256(folder / "observations.npz")
    change(folder, "parity.json", lambda report: report["sha256"].update({"observations.npz": digest}))


def everywhere(kind: str, edit: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Change all arrays of a kind, such as all ``allowed``."""
    return lambda arrays: arrays.update({key: edit(x) for key, x in arrays.items() if f"/{kind}/" in key})


def verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[set[int], set[str], str]:
    """Return the exit codes of both verifiers, the first lines that they print, and all their errors."""
    codes, first, errors = set(), set(), ""
    for main in (standalone_verify.main, verify_main):
        codes.add(main([str(folder)]))
        printed = capsys.readouterr()
        first.add(printed.out.splitlines()[0])
        errors += printed.err
    return codes, first, errors


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (everywhere("allowed", lambda x: np.full_like(x, 1e30)), "allowed/.* must be finite, above 0"),
        (everywhere("allowed", lambda x: np.full_like(x, 100.0)), "allowed/.* must be finite, above 0"),
        (everywhere("allowed", lambda x: np.full_like(x, np.inf)), "allowed/.* must be finite, above 0"),
        (everywhere("allowed", lambda x: -x), "allowed/.* must be finite, above 0"),
        (everywhere("allowed", lambda x: x.astype(complex)), "allowed/.* is complex128"),
        (everywhere("allowed", lambda x: x > 0), "allowed/.* is bool"),
        (everywhere("allowed", lambda x: x.astype(np.int32) + 1), "allowed/.* is int32"),
        (everywhere("allowed", lambda x: x.astype(str)), "allowed/.* is <U"),
        (everywhere("expected", lambda x: x.astype(str)), "expected/.* is <U"),
        (everywhere("expected", lambda x: x.astype([("x", "f4")])), "expected/.* is .*'x'"),
        (everywhere("expected", lambda x: x.astype(complex)), "expected/.* is complex128"),
        (everywhere("expected", lambda x: np.float32(0.0)), r"expected/.* is float32\[\]"),
        (everywhere("observation", lambda x: x.astype("S8")), "observation/.* is .S8"),
        (everywhere("observation", lambda x: x.astype("M8[s]")), "observation/.* is datetime64"),
        (everywhere("observation", lambda x: x.astype(">f4")), "observation/.* is >f4"),
    ],
)
def test_arrays_that_decide_nothing_cannot_be_checked(
    edit: Any, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_arrays(folder, edit)
    codes, first, errors = verdicts(folder, capsys)
    assert (codes, first) == ({2}, {"FAIL: it cannot be checked"})
    assert len(re.findall(text, errors)) == 2


@pytest.mark.parametrize("factor", [30.0, 1e4, 1e6])
def test_no_certificate_can_allow_another_policy(
    factor: float, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_arrays(folder, everywhere("allowed", lambda x: factor * x))
    assert verdicts(folder, capsys)[0] <= {0, 2}
    change_arrays(folder, everywhere("expected", lambda x: x + np.float32(0.05)))
    codes, first, _ = verdicts(folder, capsys)
    assert codes <= {1, 2} and all(line.startswith("FAIL") for line in first)


HOSTILE = "evil\x1b[2J\u202e\r\nPASS"


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("parity.json", lambda x: x["sha256"].update({HOSTILE: "0" * 64})),
        ("parity.json", lambda x: x["rows"].update({HOSTILE: 1})),
        ("parity.json", lambda x: x["artefacts"].update({HOSTILE: 1})),
        ("parity.json", lambda x: x.update(schema_version=HOSTILE)),
        ("contract.json", lambda x: x["observation"][0].update(name=HOSTILE)),
        ("contract.json", lambda x: x["outputs"][1].update(name=HOSTILE)),
        ("policy.json", lambda x: x.update({HOSTILE: 1})),
        ("policy.json", lambda x: x["observation"].update({HOSTILE: 1})),
        ("policy.onnx", lambda folder: (folder / f"policy.{HOSTILE}").touch()),
        ("observations.npz", lambda x: x.update({f"{HOSTILE}/expected/action": np.zeros(1, np.float32)})),
        ("observations.npz", lambda x: x.update({f"zeros/expected/{HOSTILE}": np.zeros(1, np.float32)})),
    ],
)
def test_names_are_printed_escaped(name: str, edit: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder) if name == "policy.onnx" else (
        change_arrays if name == "observations.npz" else partial(change, name=name)
    )(folder, edit=edit)
    for main in (standalone_verify.main, verify_main):
        code, printed = main([str(folder)]), "".join(capsys.readouterr())
        assert all(c.isprintable() for c in printed.replace("\n", "")), printed
        assert code == 0 or "\nPASS" not in printed


def test_a_model_named_location_is_read_and_one_with_external_data_is_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    model = onnx.load(folder / "policy.onnx")
    for node in model.graph.node:
        node.name, node.doc_string = "location", "location"
    model.metadata_props.add().key = "location"
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString())
    assert standalone_verify.read_graph(file) == file.read_bytes()
    for hidden in ("initializer", "constant", "subgraph"):
        tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [0.0])
        tensor.ClearField("float_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.value, entry.key = "anywhere", "location"
        changed = onnx.ModelProto.FromString(file.read_bytes())
        inner = onnx.helper.make_graph([], "inner", [], [], [tensor])
        if hidden == "initializer":
            changed.graph.initializer.append(tensor)
        else:
            value = tensor if hidden == "constant" else inner
            changed.graph.node.append(onnx.helper.make_node("Any", [], ["w"], value=value))
        (tmp_path / "changed.onnx").write_bytes(changed.SerializeToString())
        with pytest.raises(standalone_verify.ParityError, match="external data"):
            standalone_verify.read_graph(tmp_path / "changed.onnx")


def test_another_policy_is_a_mismatch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        arrays["environment/expected/mean"][5] += 2.0 * arrays["environment/allowed/mean"][5]

    change_arrays(folder, edit)
    for main in (standalone_verify.main, verify_main):
        assert main([str(folder)]) == 1
        assert "mean of 'environment' is off by" in capsys.readouterr().err


def test_without_an_onnx_graph_nothing_is_verified(folder: Path) -> None:
    (folder / "policy.onnx").unlink()
    change(folder, "parity.json", lambda x: (x["artefacts"].pop("onnx"), x["sha256"].pop("policy.onnx")))
    assert standalone_verify.main([str(folder)]) == 3


@pytest.mark.parametrize("name", ["parity", "contract", "episode"])
def test_an_export_is_valid_by_its_schema(name: str, exported: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads((exported / f"{name}.json").read_text())
    jsonschema.validate(document, schema)
    for key in schema["required"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in document.items() if k != key}, schema)


def test_the_schemas_require_what_the_verifier_does() -> None:
    keys = {
        "parity": standalone_verify._KEYS,
        "contract": standalone_verify._CONTRACT_KEYS,
        "episode": standalone_verify._EPISODE_KEYS,
    }
    for name, wanted in keys.items():
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
        assert set(schema["required"]) == set(wanted)
    formats = json.loads((SCHEMAS / "parity.schema.json").read_text())["properties"]["artefacts"]["properties"]
    assert tuple(formats) == standalone_verify.FORMAT_NAMES


def test_a_policy_of_torch_is_certified_by_its_own_answers(tmp_path: Path) -> None:
    import runpy

    import torch

    certify = runpy.run_path(str(VERIFIER.parent.parent / "benchmarks" / "certify_others.py"))["certify"]
    observations = {"environment": np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)}
    for name in ("one", "other"):
        actor = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ELU(), torch.nn.Linear(8, 2))
        certify(actor, observations, tmp_path / name, "torch", 0)
        assert standalone_verify.main([str(tmp_path / name)]) == verify_main([str(tmp_path / name)]) == 0
    shutil.copy(tmp_path / "other" / "policy.onnx", tmp_path / "one")
    digest = standalone_verify.sha256(tmp_path / "one" / "policy.onnx")
    change(tmp_path / "one", "parity.json", lambda report: report["sha256"].update({"policy.onnx": digest}))
    assert standalone_verify.main([str(tmp_path / "one")]) == verify_main([str(tmp_path / "one")]) == 1
