"""The certificate as a standard: its schemas, and the verifier that is one file."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
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
    ],
)
def test_both_verifiers_have_the_same_verdict(name: str, edit: Any, code: int, folder: Path) -> None:
    change(folder, name, edit)
    assert standalone_verify.main([str(folder)]) == code
    assert verify_main([str(folder)]) == code


def test_another_policy_is_a_mismatch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(folder / "observations.npz") as file:
        arrays = dict(file)
    arrays["environment/expected/mean"][5] += 2.0 * arrays["environment/allowed/mean"][5]
    np.savez(folder / "observations.npz", **arrays)
    digest = standalone_verify.sha256(folder / "observations.npz")
    change(folder, "parity.json", lambda report: report["sha256"].update({"observations.npz": digest}))
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
