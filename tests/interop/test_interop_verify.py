"""Verification of an export by whoever: no code of a stranger's folder runs, and nothing in it vouches for itself."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_policies import ORIGIN, policy_for

from ejax.envs.tasks.point_mass import PointMassRL
from interop.artefacts.formats import FORMATS
from interop.export import export_policy
from interop.standalone_verify import sha256
from interop.twin.kinds import spec_from_json, spec_to_json
from interop.verify import main

pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
hostile_files = pytest.importorskip("hostile_files")

HERE = [name for name, form in FORMATS.items() if not form.missing(to_write=True)]
SAFE = [name for name in HERE if not FORMATS[name].runs_code]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export random weights, in every format that can be written here."""
    env = PointMassRL()
    policy, params = policy_for(env)
    directory = tmp_path_factory.mktemp("export") / "exported"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interop.standalone_verify.BATCH_SIZES", (1,))  # StableHLO is compiled for each size
        export_policy(policy, params, env, directory, HERE, origin=ORIGIN)
    return directory


@pytest.fixture
def folder(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a copy to spoil."""
    monkeypatch.setattr("interop.standalone_verify.BATCH_SIZES", (1,))
    return Path(shutil.copytree(exported, tmp_path / "stranger"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the certificate, as anyone can."""
    file = folder / "parity.json"
    report = json.loads(file.read_text())
    change(report)
    file.write_text(json.dumps(report))


def seal(folder: Path, name: str) -> None:
    """Give a changed file its new digest."""
    rewrite(folder, lambda report: report["sha256"].update({name: sha256(folder / name)}))


def keep_only(folder: Path, *formats: str) -> None:
    def drop(report: dict[str, Any]) -> None:
        for name in report["artefacts"].keys() - set(formats):
            (folder / FORMATS[name].file).unlink()
            del report["artefacts"][name], report["sha256"][FORMATS[name].file]

    rewrite(folder, drop)


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
def test_code_in_an_artefact_runs_with_trust_only(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, good = tmp_path / "ran", tmp_path / "good.pt2"
    if kind == "TorchScript":
        name = "policy.torchscript"
        hostile_files.write_torchscript(folder / name, marker)
    else:
        name = "policy.pt2"
        (folder / name).rename(good)
        hostile_files.write_pt2(folder / name, good, kind, marker)
    seal(folder, name)
    assert main([str(folder)]) == 0
    assert not marker.exists()
    assert main([str(folder), "--trust"]) == 1
    assert marker.exists(), "the file is not hostile"
    assert "not the policy that was certified" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pickle 2", "torch", "torch, its older format"])
def test_code_in_the_weights_runs_neither_with_trust_nor_without(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "ran"
    (folder / "policy.pt").write_bytes(hostile_files.pickled(marker)[kind])
    seal(folder, "policy.pt")
    for options in ([], ["--trust"]):
        assert main([str(folder), *options]) == 1
        assert not marker.exists()
        assert "pt: " in capsys.readouterr().err


def test_stablehlo_that_calls_functions_outside_itself_is_not_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "stablehlo" not in HERE:
        pytest.skip("needs flatbuffers: pip install flatbuffers")
    shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    (folder / "policy.stablehlo").write_bytes(jax.export.export(jax.jit(jnp.linalg.cholesky))(shape).serialize())
    seal(folder, "policy.stablehlo")
    assert main([str(folder)]) == 1
    assert "stablehlo: it calls functions outside itself" in capsys.readouterr().err


def test_onnx_with_weights_in_another_file_is_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "onnx" not in HERE:
        pytest.skip("needs pip install -e '.[export]'")
    import onnx

    model = onnx.load(folder / "policy.onnx")
    (folder / "policy.onnx").unlink()
    onnx.save_model(model, folder / "policy.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (folder / "weights.bin").exists()
    seal(folder, "policy.onnx")
    assert main([str(folder)]) == 1
    assert "onnx: it has external data" in capsys.readouterr().err


@pytest.mark.parametrize("name", HERE)
def test_each_artefact_has_to_have_its_digest(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / FORMATS[name].file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main([str(folder)]) == 1
    assert f"missing or changed since the export: {file.name}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAFE)
def test_a_broken_artefact_under_a_new_digest_is_a_mismatch(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / FORMATS[name].file
    whole = file.read_bytes()
    for broken in (b"", b"hello", whole[: len(whole) // 2]):
        file.write_bytes(broken)
        seal(folder, file.name)
        assert main([str(folder)]) == 1
        assert f"{name}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda r: r.update(sha256={}), 2, "'sha256' must be a mapping that is not empty"),
        (lambda r: r.update(artefacts={}), 2, "'artefacts' must be a mapping that is not empty"),
        (lambda r: r.update(schema_version=0), 2, "'schema_version' must be 1, got 0"),
        (lambda r: r.update(schema_version="1"), 2, "'schema_version' must be 1, got \"1\""),
        (lambda r: r.update(schema_version=True), 2, "'schema_version' must be 1, got true"),
        (lambda r: r.pop("schema_version"), 2, "'schema_version' must be 1, got nothing"),
        (lambda r: r.pop("rows"), 2, "'rows' must be a mapping"),
        (lambda r: r.update(rows={"environment": 1}), 2, "does not have the cases and rows that parity.json lists"),
        (lambda r: r["artefacts"].update(tflite={"file": "policy.tflite"}), 2, "'artefacts' must be"),
        (lambda r: r["artefacts"]["pt"].update(file="../elsewhere.pt"), 2, "'artefacts' must be"),
        (lambda r: r["artefacts"].update(pt=3), 2, "'artefacts' must be"),
        (lambda r: r["sha256"].update({"../outside": "0" * 64}), 2, "'sha256' must be"),
        (lambda r: r["sha256"].update({"policy.pt": 3}), 2, "'sha256' must be"),
        (lambda r: r["sha256"].pop("contract.json"), 1, "no SHA-256 of contract.json"),
        (lambda r: r["sha256"].pop("policy.json"), 1, "no SHA-256 of policy.json"),
        (lambda r: r["sha256"].pop("observations.npz"), 1, "no SHA-256 of observations.npz"),
        (lambda r: r["sha256"].pop("policy.pt2"), 1, "no SHA-256 of policy.pt2"),
        (lambda r: r["artefacts"].pop("pt"), 1, "does not list policy.pt under artefacts"),
    ],
)
def test_the_certificate_is_not_believed(
    change: Any, code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(folder, change)
    assert main([str(folder)]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "python -m interop.export RUN --to DIR" in error or "observations.npz" in error


@pytest.mark.parametrize("content", ["", "[]", "null", "{", "[" * 100_000, '{"schema_version": 1}'])
def test_a_certificate_that_is_none_is_refused(content: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "parity.json").write_text(content)
    assert main([str(folder)]) == 2
    assert 50 < len(capsys.readouterr().err) < 2_000


@pytest.mark.parametrize("name", ["parity.json", "policy.json", "observations.npz", "policy.pt"])
def test_files_are_bounded(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("interop.standalone_verify.check_plain.__defaults__", (1 << 27,))
    os.truncate(folder / name, (1 << 27) + 1)
    if name != "parity.json":
        seal(folder, name)
    assert main([str(folder)]) == (1 if name == "policy.pt" else 2)
    assert re.search(r"has 134217729 bytes; at most \d+ are read", capsys.readouterr().err)


def test_observations_that_unpack_to_more_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("interop.standalone_verify.MAX_ARTEFACT", 1 << 20)
    np.savez_compressed(folder / "observations.npz", x=np.zeros(1 << 18))
    seal(folder, "observations.npz")
    assert main([str(folder)]) == 2
    assert "unpacked it has 2097280 bytes; at most 1048576 are read" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [101, 300, 600, 800, 900, 950, 980, 990, 100_000])
def test_no_depth_exhausts_the_stack_of_who_reads(depth: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested = "[" * depth + "]" * depth
    (folder / "policy.json").write_text(f'{{"schema_version": 1, "kind": {nested}, "head": {nested}}}')
    seal(folder, "policy.json")
    assert main([str(folder)]) == 2
    (folder / "parity.json").write_text(f'{{"schema_version": {nested}}}')
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err.count("is nested deeper than 100 levels") == 2


@pytest.mark.skipif("safetensors" not in SAFE, reason="needs safetensors: pip install -e '.[export]'")
def test_quantized_weights_are_refused_by_name_and_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch would take their numbers without their scales."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "policy.safetensors"
    save_file({name: x.to(torch.float8_e4m3fn) for name, x in load_file(file).items()}, file)
    seal(folder, file.name)
    assert main([str(folder)]) == 1
    assert re.search(r"safetensors: .*must be a dense tensor .* got a tensor float8_e4m3fn", capsys.readouterr().err)


def test_a_broken_artefact_that_both_lists_lack_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "policy.onnx").write_bytes(b"broken")

    def forget(report: dict[str, Any]) -> None:
        report["artefacts"].pop("onnx", None)
        report["sha256"].pop("policy.onnx", None)

    rewrite(folder, forget)
    assert main([str(folder)]) == 1
    assert "does not list policy.onnx under artefacts" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["policy.tflite", "policy.pt.bak", "episode.json"])
def test_files_that_are_not_of_the_export_are_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "README.md").write_text("Notes of whoever drives the robot are no matter.")
    assert main([str(folder)]) == 0
    (folder / name).write_text("{}")
    assert main([str(folder)]) == 1
    assert name in capsys.readouterr().err


def test_errors_in_the_certificate_decide_nothing(folder: Path) -> None:
    def worsen(report: dict[str, Any]) -> None:
        for facts in report["artefacts"].values():
            facts |= {"of_allowed": 1e9, "max_abs": 1e9}
        report["largest_allowed"] = {"environment": {"action": 0.0}}

    rewrite(folder, worsen)
    assert main([str(folder)]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.update({"environment/allowed/action": np.float32(np.nan)}), "must be finite, above 0"),
        (lambda arrays: arrays.update({"environment/allowed/mean": np.float32(np.inf)}), "must be finite, above 0"),
        (lambda arrays: arrays.update({"huge/allowed/mean": np.float32(0.0)}), "must be finite, above 0"),
        (lambda arrays: arrays.pop("zeros/expected/action"), "does not have the cases and rows"),
        (lambda arrays: arrays.pop("zeros/expected/mean"), "in case 'zeros' expected/mean is None"),
        (lambda arrays: arrays.pop("zeros/allowed/mean"), "in case 'zeros' allowed/mean is None"),
        (lambda arrays: arrays.update(odd=np.zeros(3)), "does not hold an export's observations"),
        (lambda arrays: arrays.clear(), "does not have the cases and rows"),
    ],
)
def test_observations_that_let_everything_pass_are_refused(
    change: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load(folder / "observations.npz") as file:
        arrays = dict(file)
    shapes = {name: x.shape for name, x in arrays.items()}
    change(arrays)
    arrays = {name: np.broadcast_to(x, shapes.get(name, x.shape)) for name, x in arrays.items()}
    np.savez(folder / "observations.npz", **arrays)
    seal(folder, "observations.npz")
    assert main([str(folder)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(observation=3), "'observation' must be"),
        (lambda spec: spec["actor"].update(hidden_sizes=["a"]), "'actor.hidden_sizes.0' must be int, got 'a'"),
        (lambda spec: spec["actor"].update(inputs=["odd"]), "lacks odd"),
        (lambda spec: spec["actor"].pop("activation"), "under actor lacks activation"),
        (lambda spec: spec.update(code="import os"), "has unknown code"),
        (lambda spec: spec.update(head="odd"), "'head' must be"),
        (lambda spec: spec.update(clip=[[0.0]]), "'clip' must be"),
        (lambda spec: spec.update(schema_version=True), "schema version True"),
    ],
)
def test_an_odd_spec_is_refused(change: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = json.loads((folder / "policy.json").read_text())
    change(spec)
    (folder / "policy.json").write_text(json.dumps(spec))
    seal(folder, "policy.json")
    assert main([str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_the_spec_of_an_export_survives_its_file(exported: Path) -> None:
    text = (exported / "policy.json").read_text()
    assert spec_to_json(spec_from_json(text)) == text


@pytest.mark.parametrize("value", [1e39, -1e300, np.int64(2**24 + 1), np.int64(2**63 - 1), 3.5e38], ids=repr)
def test_torch_refuses_a_number_that_float32_cannot_hold(value: Any, exported: Path) -> None:
    from interop.policy import load_policy

    policy = load_policy(exported)
    ((name, width),) = policy.spec.observation.items()
    for right in (np.float64(0.1), np.float16(2.0), np.int64(2**24), True):
        assert np.isfinite(policy.act(np.full(width, right))).all() and policy.value(np.full((1, width), right)).shape
    for call in (policy.act, policy.value):
        with pytest.raises(ValueError, match=rf"'{name}' has .*, which float32 cannot hold"):
            call(np.full((1, width), value))


def test_an_export_of_which_nothing_is_run_is_not_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_only(folder, "torchscript")
    assert main([str(folder)]) == 3
    assert "no artefact was run" in capsys.readouterr().err
    assert main([str(folder), "--trust"]) == 0


@pytest.mark.skipif("onnx" not in SAFE, reason="needs pip install -e '.[export]'")
@pytest.mark.parametrize(
    "value", [1e39, -1e300, np.int64(2**24 + 1), np.uint64(2**64 - 1), np.longdouble("1e400"), 3.5e38], ids=repr
)
def test_a_number_that_the_policys_input_cannot_hold_is_refused(value: Any, exported: Path) -> None:
    from interop.onnx_policy import load_policy
    from interop.serving.policies import load_served

    served, policy = load_served(exported), load_policy(exported)
    ((name, (shape,)),) = served.shapes.items()
    for right in (np.float64(0.1), np.float16(2.0), np.int64(2**24), True):
        assert np.isfinite(policy.act(np.full(shape, right))).all() and served.leaves({name: np.full(shape, right)})
    for call in (lambda obs: policy.act(obs), lambda obs: served.leaves({name: obs})):
        with pytest.raises(ValueError, match=rf"'{name}' has .*, which float32 cannot hold"):
            call(np.full(shape, value))
