"""Verification of an export by whoever: no code of a stranger's folder runs, and nothing in it vouches for itself.

Both verifiers are asked, ``ejax verify`` and the one that is a single file.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases
from exports import HERE, copy_of, keep_only, needs, one_batch_size, rewrite, rewrite_arrays, seal
from toy_policies import ORIGIN, policy_for

from ejax.envs.tasks.point_mass import PointMassRL
from interop import standalone_verify
from interop.artefacts.formats import FORMATS
from interop.export import export_policy
from interop.twin.kinds import spec_from_json, spec_to_json
from interop.verify import main

pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
hostile_files = pytest.importorskip("hostile_files")

SAFE = [name for name in HERE if not FORMATS[name].runs_code]
VERIFIER = Path(standalone_verify.__file__)
SCHEMAS = VERIFIER.with_name("schemas")
needs_onnx = needs("onnx")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export random weights, in every format that can be written here."""
    env = PointMassRL()
    directory = tmp_path_factory.mktemp("export") / "exported"
    with pytest.MonkeyPatch.context() as patch:
        one_batch_size(patch)
        export_policy(*policy_for(env), env, directory, HERE, origin=ORIGIN, seed=0)
    return directory


@pytest.fixture
def folder(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a copy to spoil."""
    one_batch_size(monkeypatch)
    return copy_of(exported, tmp_path / "stranger")


@pytest.fixture
def light(folder: Path) -> Path:
    """Make a copy with the formats alone that every verifier, or none, runs fast."""
    keep_only(folder, *({"pt", "onnx"} & set(HERE)))
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Check that ``ejax verify`` ends with this code; return its errors."""

    def check(folder: Path, code: int, *options: str) -> str:
        assert main([str(folder), *options]) == code
        return capsys.readouterr().err

    return check


def verdicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[set[int], set[str], str]:
    """Return the exit codes of both verifiers, the first lines that they print, and all their errors."""
    codes, first, errors = set(), set(), ""
    for verifier in (standalone_verify.main, main):
        codes.add(verifier([str(folder)]))
        printed = capsys.readouterr()
        first.add(printed.out.splitlines()[0])
        errors += printed.err
    return codes, first, errors


def test_without_trust_what_can_run_code_is_listed_as_not_verified(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    for name in ("pt2", "torchscript"):
        assert f"{name:<12} not verified: can run code; add --trust if you know who made it" in out
    assert "not run, compared by SHA-256 alone: pt2, torchscript" in out
    assert main([str(folder), "--trust"]) == 0
    assert "not verified" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*hostile_files.PT2_KINDS, "TorchScript"])
def test_code_in_an_artefact_runs_with_trust_only(kind: str, folder: Path, tmp_path: Path, refused: Any) -> None:
    marker, good = tmp_path / "ran", tmp_path / "good.pt2"
    name = "policy.torchscript" if kind == "TorchScript" else "policy.pt2"
    if kind == "TorchScript":
        hostile_files.write_torchscript(folder / name, marker)
    else:
        (folder / name).rename(good)
        hostile_files.write_pt2(folder / name, good, kind, marker)
    seal(folder, name)
    refused(folder, 0)
    assert not marker.exists()
    assert "not the policy that was certified" in refused(folder, 1, "--trust")
    assert marker.exists(), "the file is not hostile"


@pytest.mark.parametrize("kind", ["pickle 2", "torch", "torch, its older format"])
def test_code_in_the_weights_runs_neither_with_trust_nor_without(
    kind: str, folder: Path, tmp_path: Path, refused: Any
) -> None:
    marker = tmp_path / "ran"
    (folder / "policy.pt").write_bytes(hostile_files.pickled(marker)[kind])
    seal(folder, "policy.pt")
    for options in ([], ["--trust"]):
        assert "pt: " in refused(folder, 1, *options)
        assert not marker.exists()


@needs("stablehlo")
def test_stablehlo_that_calls_functions_outside_itself_is_not_run(folder: Path, refused: Any) -> None:
    shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    (folder / "policy.stablehlo").write_bytes(jax.export.export(jax.jit(jnp.linalg.cholesky))(shape).serialize())
    seal(folder, "policy.stablehlo")
    assert "stablehlo: it calls functions outside itself" in refused(folder, 1)


@needs_onnx
def test_onnx_with_weights_in_another_file_is_not_run(folder: Path, refused: Any) -> None:
    import onnx

    model = onnx.load(folder / "policy.onnx")
    (folder / "policy.onnx").unlink()
    onnx.save_model(model, folder / "policy.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (folder / "weights.bin").exists()
    seal(folder, "policy.onnx")
    assert "onnx: it has external data" in refused(folder, 1)


@needs_onnx
def test_a_model_named_location_is_read_and_one_with_external_data_is_not(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", HERE)
def test_each_artefact_has_to_have_its_digest(name: str, folder: Path, refused: Any) -> None:
    file = folder / FORMATS[name].file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"missing or changed since the export: {file.name}" in refused(folder, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAFE)
def test_a_broken_artefact_under_a_new_digest_is_a_mismatch(name: str, folder: Path, refused: Any) -> None:
    file = folder / FORMATS[name].file
    whole = file.read_bytes()
    for broken in (b"", b"hello", whole[: len(whole) // 2]):
        file.write_bytes(broken)
        seal(folder, file.name)
        assert f"{name}: " in refused(folder, 1)


CERTIFICATE = [
    (lambda r: r.update(sha256={}), 2, "'sha256'"),
    (lambda r: r.update(artefacts={}), 2, "'artefacts'"),
    (lambda r: r.update(schema_version=0), 2, "'schema_version' must be 1, got 0"),
    (lambda r: r.update(schema_version="1"), 2, "'schema_version'"),
    (lambda r: r.update(schema_version=True), 2, "'schema_version'"),
    (lambda r: r.pop("schema_version"), 2, "'schema_version' must be 1, got nothing"),
    (lambda r: r.pop("rows"), 2, "'rows'"),
    (lambda r: r.update(rows={"environment": 1}), 2, "does not have the cases and rows"),
    (lambda r: r["artefacts"].update(tflite={"file": "policy.tflite"}), 2, "'artefacts'"),
    (lambda r: r["artefacts"]["pt"].update(file="../elsewhere.pt"), 2, "'artefacts'"),
    (lambda r: r["artefacts"].update(pt=3), 2, "'artefacts'"),
    (lambda r: r["sha256"].update({"../outside": "0" * 64}), 2, "'sha256'"),
    (lambda r: r["sha256"].update({"policy.pt": 3}), 2, "'sha256'"),
    (lambda r: r["sha256"].update({"contract.json": "0" * 64}), 1, "contract.json"),
    (lambda r: r["artefacts"].pop("pt"), 1, "does not list policy.pt under artefacts"),
    *(
        (lambda r, name=name: r["sha256"].pop(name), 1, f"no SHA-256 of {name}")
        for name in ("contract.json", "policy.json", "observations.npz", "policy.pt")
    ),
]


@pytest.mark.parametrize(("change", "code", "message"), CERTIFICATE)
def test_the_certificate_is_not_believed(
    change: Any, code: int, message: str, light: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(light, "parity.json", change)
    codes, _, errors = verdicts(light, capsys)
    assert codes == {code} and errors.count(message) >= 2
    assert "ejax export RUN --to DIR" in errors or "observations.npz" in errors


@pytest.mark.parametrize("content", ["", "[]", "null", "{", "[" * 100_000, '{"schema_version": 1}'])
def test_a_certificate_that_is_none_is_refused(content: str, light: Path, refused: Any) -> None:
    (light / "parity.json").write_text(content)
    assert 50 < len(refused(light, 2)) < 2_000


FACTS = [
    ("contract.json", lambda x: x["observation"][0].update(shape=["batch", 3])),
    ("contract.json", lambda x: x["observation"][0].update(shape=[1, 14])),
    ("contract.json", lambda x: x["observation"].append(x["observation"][0])),
    ("contract.json", lambda x: x["outputs"].pop(0)),
    ("contract.json", lambda x: x["outputs"][0].update(dtype="int32")),
    ("contract.json", lambda x: x.update(schema_version=2)),
    *(
        ("contract.json", lambda x, steps=steps: x["env"].update(max_episode_steps=steps))
        for steps in (1, -1, float("inf"))
    ),
    ("episode.json", lambda x: x.pop("start")),
    ("episode.json", lambda x: x["result"].pop("return")),
    ("episode.json", lambda x: x["result"].update({"return": float("nan")})),
    *(
        ("episode.json", lambda x, length=length: x["result"].update(length=length))
        for length in (0, -1, 1.5, float("nan"), float("inf"), True, "3", None, [3])
    ),
]


@pytest.mark.parametrize(("name", "edit"), FACTS)
def test_neither_verifier_checks_by_facts_that_are_none(
    name: str, edit: Any, light: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(light, name, edit)
    assert verdicts(light, capsys)[0] == {2}


@pytest.mark.parametrize("name", ["parity.json", "policy.json", "observations.npz", "policy.pt"])
def test_files_are_bounded(name: str, light: Path, monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    monkeypatch.setattr("interop.standalone_verify.check_plain.__defaults__", (1 << 27,))
    os.truncate(light / name, (1 << 27) + 1)
    if name != "parity.json":
        seal(light, name)
    assert re.search(r"has 134217729 bytes; at most \d+ are read", refused(light, 1 if name == "policy.pt" else 2))


def test_observations_that_unpack_to_more_are_refused(
    light: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.setattr("interop.standalone_verify.MAX_ARTEFACT", 1 << 20)
    np.savez_compressed(light / "observations.npz", x=np.zeros(1 << 18))
    seal(light, "observations.npz")
    assert "unpacked it has 2097280 bytes; at most 1048576" in refused(light, 2)


@pytest.mark.parametrize("depth", [101, 300, 600, 800, 900, 950, 980, 990, 100_000])
def test_no_depth_exhausts_the_stack_of_who_reads(depth: int, light: Path, refused: Any) -> None:
    nested = "[" * depth + "]" * depth
    (light / "policy.json").write_text(f'{{"schema_version": 1, "kind": {nested}, "head": {nested}}}')
    seal(light, "policy.json")
    assert "is nested deeper than 100 levels" in refused(light, 2)
    (light / "parity.json").write_text(f'{{"schema_version": {nested}}}')
    assert "is nested deeper than 100 levels" in refused(light, 2)


@pytest.mark.skipif("safetensors" not in SAFE, reason="needs safetensors: pip install -e '.[export]'")
def test_quantized_weights_are_refused_by_name_and_type(folder: Path, refused: Any) -> None:
    """torch would take their numbers without their scales."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "policy.safetensors"
    save_file({name: x.to(torch.float8_e4m3fn) for name, x in load_file(file).items()}, file)
    seal(folder, file.name)
    assert re.search(r"safetensors: .* got a tensor float8_e4m3fn", refused(folder, 1))


@needs_onnx
def test_a_broken_artefact_that_both_lists_lack_is_found(light: Path, refused: Any) -> None:
    (light / "policy.onnx").write_bytes(b"broken")
    rewrite(light, "parity.json", lambda r: (r["artefacts"].pop("onnx"), r["sha256"].pop("policy.onnx")))
    assert "does not list policy.onnx under artefacts" in refused(light, 1)


@pytest.mark.parametrize("name", ["policy.tflite", "policy.pt.bak", "episode.json"])
def test_files_that_are_not_of_the_export_are_refused(name: str, light: Path, refused: Any) -> None:
    (light / "README.md").write_text("Notes of whoever drives the robot are no matter.")
    refused(light, 0)
    (light / name).write_text("{}")
    assert name in refused(light, 1)


def test_errors_in_the_certificate_decide_nothing(light: Path, refused: Any) -> None:
    def worsen(report: dict[str, Any]) -> None:
        for facts in report["artefacts"].values():
            facts |= {"of_allowed": 1e9, "max_abs": 1e9}
        report["largest_allowed"] = {"environment": {"action": 0.0}}

    rewrite(light, "parity.json", worsen)
    refused(light, 0)


def everywhere(kind: str, edit: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Change all arrays of a kind, such as all ``allowed``."""
    return lambda arrays: arrays.update({key: edit(x) for key, x in arrays.items() if f"/{kind}/" in key})


def filled(name: str, value: float) -> Callable[[dict[str, Any]], Any]:
    return lambda arrays: arrays.update({name: np.full_like(arrays[name], value)})


ARRAYS = [
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
    (filled("environment/allowed/action", np.nan), "must be finite, above 0"),
    (filled("environment/allowed/mean", np.inf), "must be finite, above 0"),
    (filled("huge/allowed/mean", 0.0), "must be finite, above 0"),
    (lambda arrays: arrays.pop("zeros/expected/action"), "does not have the cases and rows"),
    (lambda arrays: arrays.pop("zeros/expected/mean"), "in case 'zeros' expected/mean is None"),
    (lambda arrays: arrays.pop("zeros/allowed/mean"), "in case 'zeros' allowed/mean is None"),
    (lambda arrays: arrays.update(odd=np.zeros(3)), "does not hold an export's observations"),
    (lambda arrays: arrays.clear(), "does not have the cases and rows"),
]


@pytest.mark.parametrize(("edit", "text"), ARRAYS)
def test_arrays_that_decide_nothing_cannot_be_checked(
    edit: Any, text: str, light: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_arrays(light, edit)
    codes, first, errors = verdicts(light, capsys)
    assert (codes, first) == ({2}, {"FAIL: it cannot be checked"})
    assert len(re.findall(text, errors)) == 2


@pytest.mark.parametrize("factor", [30.0, 1e4, 1e6])
def test_no_certificate_can_allow_another_policy(
    factor: float, light: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_arrays(light, everywhere("allowed", lambda x: factor * x))
    assert verdicts(light, capsys)[0] <= {0, 2}
    rewrite_arrays(light, everywhere("expected", lambda x: x + np.float32(0.05)))
    codes, first, _ = verdicts(light, capsys)
    assert codes <= {1, 2} and all(line.startswith("FAIL") for line in first)


@needs_onnx
def test_another_policy_is_a_mismatch(light: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(arrays: dict[str, Any]) -> None:
        arrays["environment/expected/mean"][5] += 2.0 * arrays["environment/allowed/mean"][5]

    rewrite_arrays(light, edit)
    codes, _, errors = verdicts(light, capsys)
    assert codes == {1} and errors.count("mean of 'environment' is off by") >= 2


HOSTILE = "evil\x1b[2J\u202e\r\nPASS"


@cases(
    "name edit",
    ("parity.json", lambda x: x["sha256"].update({HOSTILE: "0" * 64})),
    ("parity.json", lambda x: x["rows"].update({HOSTILE: 1})),
    ("parity.json", lambda x: x["artefacts"].update({HOSTILE: 1})),
    ("parity.json", lambda x: x.update(schema_version=HOSTILE)),
    ("contract.json", lambda x: x["observation"][0].update(name=HOSTILE)),
    ("contract.json", lambda x: x["outputs"][1].update(name=HOSTILE)),
    ("policy.json", lambda x: x.update({HOSTILE: 1})),
    ("policy.json", lambda x: x["observation"].update({HOSTILE: 1})),
    (f"policy.{HOSTILE}", None),
    ("observations.npz", lambda x: x.update({f"{HOSTILE}/expected/action": np.zeros(1, np.float32)})),
    ("observations.npz", lambda x: x.update({f"zeros/expected/{HOSTILE}": np.zeros(1, np.float32)})),
)
def test_names_are_printed_escaped(name: str, edit: Any, light: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if edit is None:
        (light / name).touch()
    elif name == "observations.npz":
        rewrite_arrays(light, edit)
    else:
        rewrite(light, name, edit)
    for verifier in (standalone_verify.main, main):
        code, printed = verifier([str(light)]), "".join(capsys.readouterr())
        assert all(c.isprintable() for c in printed.replace("\n", "")), printed
        assert code == 0 or "\nPASS" not in printed


@cases(
    "change message",
    (lambda spec: spec.update(observation=3), "'observation' must be"),
    (lambda spec: spec["actor"].update(hidden_sizes=["a"]), "'actor.hidden_sizes.0' must be int, got 'a'"),
    (lambda spec: spec["actor"].update(inputs=["odd"]), "lacks odd"),
    (lambda spec: spec["actor"].pop("activation"), "under actor lacks activation"),
    (lambda spec: spec.update(code="import os"), "has unknown code"),
    (lambda spec: spec.update(head="odd"), "'head' must be"),
    (lambda spec: spec.update(clip=[[0.0]]), "'clip' must be"),
    (lambda spec: spec.update(schema_version=True), "schema version True"),
    (lambda spec: spec.update(schema_version=9), "schema version 9, this interop reads 1, 2, 3, 4"),
    (lambda spec: spec["actor"].update(num_blocks=2, hidden_sizes=[8] * 3), "the two hidden_sizes of its blocks"),
)
def test_an_odd_spec_is_refused(change: Any, message: str, light: Path, refused: Any) -> None:
    rewrite(light, "policy.json", change)
    assert message in refused(light, 2)


@pytest.mark.parametrize("version", [1, 3])
def test_a_spec_survives_its_file_also_from_before_images_or_blocks(version: int, exported: Path) -> None:
    text = (exported / "policy.json").read_text()
    spec = spec_from_json(text)
    assert spec_to_json(spec) == text
    raw = {**json.loads(text), "schema_version": version}
    for name in ("log_std", "images", "encoder", "unread")[: 4 if version == 1 else 1]:
        del raw[name]
    for network in (raw["actor"], raw["critic"]):
        del network["num_blocks"], network["rms_norm"]
    assert spec_from_json(json.dumps(raw)) == spec


TOO_LARGE = [1e39, -1e300, 3.5e38, np.int64(2**24 + 1), np.int64(2**63 - 1), np.uint64(2**64 - 1)]


@cases(
    "consumer value",
    *(("torch", value) for value in TOO_LARGE),
    *(pytest.param("onnx", value, marks=needs_onnx) for value in (*TOO_LARGE, np.longdouble("1e400"))),
)
def test_a_number_that_float32_cannot_hold_is_refused(consumer: str, value: Any, exported: Path) -> None:
    from interop import onnx_policy, policy
    from interop.serving.policies import load_served

    if consumer == "torch":
        loaded = policy.load_policy(exported)
        calls = [loaded.act, loaded.value]
    else:
        calls = [onnx_policy.load_policy(exported).act, lambda obs: load_served(exported).leaves({"obs": obs})]
    for right in (np.float64(0.1), np.float16(2.0), np.int64(2**24), True):
        for call in calls:
            call(np.full((14,), right))
    for call in calls:
        with pytest.raises(ValueError, match=r"'obs' has .*, which float32 cannot hold"):
            call(np.full((14,), value))


def test_an_export_of_which_nothing_is_run_is_not_verified(folder: Path, refused: Any) -> None:
    keep_only(folder, "torchscript")
    assert "no artefact was run" in refused(folder, 3)
    assert standalone_verify.main([str(folder)]) == 3
    refused(folder, 0, "--trust")


@needs_onnx
def test_the_file_alone_verifies_an_export(light: Path, tmp_path: Path) -> None:
    copied = shutil.copy(VERIFIER, tmp_path / "copied_verify.py")
    assert len(VERIFIER.read_text().splitlines()) < 500
    blocked = "import runpy, sys; sys.modules.update(dict.fromkeys(('ejax', 'interop', 'jax', 'torch', 'onnx'))); "
    code = f"{blocked}sys.argv[1:] = [{str(light)!r}]; runpy.run_path({str(copied)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "of what is allowed" in done.stdout
    assert standalone_verify.sha256(light / "parity.json") in done.stdout
    assert "not run, compared by SHA-256 alone: pt" in done.stdout


@pytest.mark.parametrize("name", ["parity", "contract", "episode"])
def test_an_export_is_valid_by_its_schema_which_requires_what_the_verifier_does(name: str, exported: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads((exported / f"{name}.json").read_text())
    jsonschema.validate(document, schema)
    for key in schema["required"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in document.items() if k != key}, schema)
    wanted = "_KEYS" if name == "parity" else f"_{name.upper()}_KEYS"
    assert set(schema["required"]) == set(getattr(standalone_verify, wanted))
    if name == "parity":
        assert tuple(schema["properties"]["artefacts"]["properties"]) == standalone_verify.FORMAT_NAMES


@needs_onnx
def test_a_policy_of_torch_is_certified_by_its_own_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    certify = runpy.run_path(str(VERIFIER.parent.parent / "benchmarks" / "certify_others.py"))["certify"]
    observations = {"environment": np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)}
    for name in ("one", "other"):
        actor = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ELU(), torch.nn.Linear(8, 2))
        certify(actor, observations, tmp_path / name, "torch", 0)
        assert verdicts(tmp_path / name, capsys)[0] == {0}
    shutil.copy(tmp_path / "other" / "policy.onnx", tmp_path / "one")
    seal(tmp_path / "one", "policy.onnx")
    assert verdicts(tmp_path / "one", capsys)[0] == {1}
