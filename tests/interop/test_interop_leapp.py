"""LEAPP bundles: their content, and their answers over an episode by leapp's own InferenceManager."""

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pickle
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from exports import needs, save_run
from tiny import NETWORK, tiny

from ejax.config import parse_config
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.play.saved_policy import restore_policy
from ejax.policies.calls import apply_policy, first_memory
from ejax.rollout import reset, step
from ejax.store.run_dir import open_run_directory
from ejax.training.environments import build_env
from interop import standalone_verify
from interop.artefacts import cases
from interop.artefacts.leapp_bundle import input_terms, load_bundle, write_bundle
from interop.export import export_run
from interop.verify import verify

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
needs_export = needs("onnx")
VERSIONS = {"ejax": "0"}
MEMORIES = {"mlp": None, "gru": {"type": "gru", "hidden_size": 5}}


@pytest.fixture(scope="module", params=MEMORIES)
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make ``(run, export)`` with a bundle of an MLP or a GRU, as if after one update, checked on few rows."""
    folder, raw = tmp_path_factory.mktemp(request.param), tiny()
    memory = {} if request.param == "mlp" else {"memory": MEMORIES[request.param]}
    raw["policy"] |= {"actor": NETWORK | memory, "critic": NETWORK | memory, "actor_obs_normalization": True}
    config = parse_config(raw)
    save_run(config, folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "_NUM_CONSECUTIVE", 40)
        patch.setattr(cases, "_NUM_STEPS", 4)
        export_run(folder / "run", folder / "exported", ["onnx"], leapp=True)
    return folder / "run", folder / "exported"


@pytest.mark.slow
@needs_export
def test_the_certificate_is_of_the_bundle_too(exported: tuple[Path, Path]) -> None:
    run, folder = exported
    report = json.loads((folder / "parity.json").read_text())
    assert {"leapp.onnx", "leapp.yaml"} <= report["sha256"].keys() and 0.0 <= report["leapp"]["of_allowed"] <= 1.0
    assert verify(folder)["leapp"]["cases"].keys() == report["rows"].keys()
    assert "skipped" in standalone_verify.verify_onnx(folder)["leapp.yaml"]
    with pytest.raises(ValueError, match=r"--leapp needs the format onnx .*; onnx is not chosen"):
        export_run(run, folder.with_name("other"), ["safetensors"], leapp=True)


@pytest.mark.slow
@needs_export
@pytest.mark.skipif(importlib.util.find_spec("leapp") is None, reason="needs leapp: pip install -e '.[leapp]'")
def test_leapps_own_manager_acts_as_jax_does_over_an_episode(exported: tuple[Path, Path]) -> None:
    import torch
    from leapp import InferenceManager

    directory, config = open_run_directory(exported[0])
    env: Any = build_env(config)
    policy, params = restore_policy(config, env, directory.find("latest", print))
    entry = json.loads((exported[1] / "contract.json").read_text())["observation"][0]
    terms = input_terms(entry)
    ends = np.cumsum([term["shape"][-1] for term in terms])[:-1]
    manager = InferenceManager(str(exported[1] / "leapp.yaml"))
    assert manager.inputs == [f"policy/{term['name']}" for term in terms]
    carry, memory, worst = reset(env, jax.random.key(1), 1), first_memory(policy, 1), 0.0
    advance = jax.jit(lambda carry, action: step(env, carry, action, jax.random.key(0)))
    length = PointMassRL(**config.env.cfg).max_episode_steps
    for _ in range(length):
        distribution, _, memory = apply_policy(policy, params, carry.obs, memory)
        expected = np.clip(distribution.mode(), -1.0, 1.0)
        parts = np.split(np.asarray(carry.obs), ends, axis=-1)
        answer = manager({name: torch.tensor(part) for name, part in zip(manager.inputs, parts, strict=True)})
        worst = max(worst, float(np.abs(answer["policy/action"].numpy() - expected).max()))
        carry, _ = advance(carry, expected)
    assert worst < 1e-6
    manager.reset()
    assert all(not manager.value_dict["policy"][name.split("/")[1]].any() for name in manager.feedback_inputs)


def feature(*names: str, unit: str) -> list[dict[str, str]]:
    return [{"name": name, "unit": unit} for name in names]


def test_an_observation_is_taken_apart_by_the_names_of_its_numbers() -> None:
    features = [
        *feature("elbow angle", "wrist 1 angle", unit="rad"),
        *feature("elbow velocity", "wrist 1 velocity", unit="rad/s"),
        *feature("hip position − home", unit="rad"),
        *feature("hand x", "hand y", unit="m"),
        *feature("left foot angle", unit="rad"),
    ]
    numbers = list(range(len(features)))
    entry = {"name": "robot", "dtype": "float32", "shape": ["batch", 8], "features": features}
    terms = input_terms({**entry, "low": numbers, "high": numbers})
    assert [(x["name"], x.get("kind"), x["element_names"][0], x["low"]) for x in terms] == [
        ("robot.angle", "state/joint/position", ["elbow", "wrist 1"], [0, 1]),
        ("robot.velocity", "state/joint/velocity", ["elbow", "wrist 1"], [2, 3]),
        ("robot.position_home", None, ["hip"], [4]),
        ("robot.hand", None, ["x", "y"], [5, 6]),
        ("robot.angle_7", "state/joint/position", ["left foot"], [7]),
    ]


def written(folder: Path) -> dict[str, Any]:
    """Write a bundle of ``action = 2·obs``, with a memory that counts the rows; return ``leapp.yaml``."""
    shapes = {"obs": 3, "memory": 1, "action": 3, "mean": 3, "next_memory": 1}
    values = {
        name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", n]) for name, n in shapes.items()
    }
    nodes = [
        ("Add", ["obs", "obs"], "action"),
        ("Identity", ["obs"], "mean"),
        ("Add", ["memory", "one"], "next_memory"),
    ]
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    made = [helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes]
    inputs, outputs = (
        [values[name] for name in names] for names in (["obs", "memory"], ["action", "mean", "next_memory"])
    )
    model = helper.make_model(
        helper.make_graph(made, "policy", inputs, outputs, [one]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    (folder / "policy.onnx").write_bytes(model.SerializeToString())
    entries = [{"name": name, "shape": ["batch", n], "dtype": "float32"} for name, n in shapes.items()]
    angles = {"features": feature("elbow angle", "wrist angle", unit="rad") + feature("grip", unit="1")}
    acted = feature("elbow angle change / action_scale", "wrist target velocity", unit="rad") + feature(
        "grip", unit="N"
    )
    contract = {
        "env": {"id": "Arm", "cfg": {}, "parameters": {"action_scale": 0.1}},
        "control_rate_hz": 50.0,
        "observation": [{**entries[0], **angles, "low": [-1.0, -2.0, 0.0], "high": [1.0, 2.0, 1.0]}, entries[1]],
        "outputs": entries[2:],
        "action": {"head": "normal", "features": acted, "low": [-1.0] * 3, "high": [1.0, 1.0, None], "clipped": True},
    }
    (folder / "contract.json").write_text(json.dumps(contract))
    write_bundle(folder, None, VERSIONS)
    return yaml.safe_load((folder / "leapp.yaml").read_text())


def test_a_bundle_says_what_each_number_is(tmp_path: Path) -> None:
    described = written(tmp_path)
    model, pipeline = described["models"]["policy"], described["pipeline"]
    angle, grip, memory = model["inputs"]
    assert (angle["name"], angle["shape"], angle["units"]) == ("obs.angle", [1, 2], "rad")
    assert (angle["kind"], angle["element_names"]) == ("state/joint/position", [["elbow", "wrist"]])
    assert (angle["low"], angle["normalization"], grip["low"]) == ([-1.0, -2.0], "in the model: pass raw values", [0.0])
    assert memory["shape"] == [1, 1] and [x["name"] for x in model["outputs"]] == ["action", "next_memory"]
    action = model["outputs"][0]
    assert action["drive_mode"] == ["position change", "position", "effort"] and action["high"] == [1.0, 1.0, None]
    assert pipeline["inputs"] == {"policy": ["obs.angle", "obs.grip"]} and pipeline["outputs"] == {"policy": ["action"]}
    assert pipeline["feedback_flow"] == {"policy/next_memory": ["policy/memory"]}
    assert pipeline["configs"]["frequency"] == 50.0
    assert pipeline["configs"]["environment"]["parameters"] == {"action_scale": 0.1}
    digest = hashlib.sha256((tmp_path / "leapp.onnx").read_bytes()).hexdigest()
    assert (model["parameters"]["model_path"], model["parameters"]["sha256sum"]) == ("leapp.onnx", digest)
    if importlib.util.find_spec("safetensors"):
        from safetensors.numpy import load_file

        start = load_file(tmp_path / pipeline["initial_values"])
        assert start.keys() == {"policy/memory"} and start["policy/memory"].tolist() == [[0.0]]


def test_a_bundle_answers_as_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    written(tmp_path)
    obs, memory = np.arange(12, dtype=np.float32).reshape(4, 3), np.zeros((4, 1), np.float32)
    action, after = load_bundle(tmp_path, None, VERSIONS)([obs, memory])
    np.testing.assert_array_equal(action, 2.0 * obs)
    np.testing.assert_array_equal(after, memory + 1.0)


def refresh(folder: Path) -> None:
    """Write what lies beside the model again, as whoever forges it would."""
    from interop.artefacts.leapp_bundle import _beside_model

    for name, content in _beside_model(folder, None, VERSIONS).items():
        (folder / name).write_bytes(content)


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / "leapp.yaml").read_text()
        assert text.count(old) == 1
        (folder / "leapp.yaml").write_text(text.replace(old, new))

    return change


def described(edit: Callable[[dict[str, Any]], Any], **style: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = yaml.safe_load((folder / "leapp.yaml").read_text())
        edit(content)
        (folder / "leapp.yaml").write_text(yaml.safe_dump(content, sort_keys=False, **style))

    return change


def parameters(**changed: str) -> Callable[[Path], None]:
    return described(lambda x: x["models"]["policy"]["parameters"].update(changed))


def linked(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.with_name("elsewhere"))
        (folder / name).symlink_to(folder.with_name("elsewhere"))

    return change


def beside(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def with_weights_in(file: str) -> Callable[[Path], None]:
    """Put the model's weights into another file, and name that model in the description."""

    def change(folder: Path) -> None:
        model = onnx.load(folder / "leapp.onnx")
        tensor = model.graph.initializer[0]
        (folder / "weights").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", file.format(folder)
        content = model.SerializeToString()
        (folder / "leapp.onnx").write_bytes(content)
        new = {f"{kind}sum": hashlib.new(kind, content).hexdigest() for kind in ("sha256", "md5")}
        described(lambda x: x["models"]["policy"]["parameters"].update(new), default_flow_style=None, width=120)(folder)

    return change


def with_operator(domain: str, kind: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        model = onnx.load(folder / "leapp.onnx")
        model.opset_import.append(helper.make_opsetid(domain, 1))
        model.graph.node[1].domain, model.graph.node[1].op_type = domain, kind
        (folder / "leapp.onnx").write_bytes(model.SerializeToString())
        refresh(folder)

    return change


FORGED = {
    "backend: jit": (parameters(backend="jit"), "backend: jit"),
    "backend: pt2": (replaced("backend: onnx", "backend: pt2"), "backend: pt2"),
    "an unknown backend": (parameters(backend="other"), "backend: other"),
    "no backend": (described(lambda x: x["models"]["policy"]["parameters"].pop("backend")), "leapp.yaml"),
    "a model above the folder": (parameters(model_path="../leapp.onnx"), r"model_path: \.\./leapp\.onnx"),
    "an absolute model": (parameters(model_path="/tmp/x.onnx"), "model_path: /tmp/x.onnx"),
    "a model of a Windows drive": (parameters(model_path="C:\\x.onnx"), "model_path: C:"),
    "a model in a folder": (parameters(model_path="a/leapp.onnx"), "model_path: a/leapp.onnx"),
    "the model that is a link": (linked("leapp.onnx"), "leapp.onnx must be a file of the folder, not a link"),
    "a description that is a link": (linked("leapp.yaml"), "leapp.yaml must be a file of the folder, not a link"),
    "two models": (described(lambda x: x["models"].update(second=x["models"]["policy"])), "leapp.yaml"),
    "no model": (described(lambda x: x["models"].clear()), "leapp.yaml"),
    "another start": (described(lambda x: x["pipeline"].update(initial_values="../x")), "initial_values: ../x"),
    "other digests": (parameters(sha256sum="0" * 64), "sha256sum: .0000"),
    "another input": (described(lambda x: x["models"]["policy"]["inputs"][0].update(units="m")), "units: m"),
    "another rate": (replaced("frequency: 50.0", "frequency: 500.0"), "frequency: 500.0"),
    "another drive": (replaced("position change", "velocity"), "velocity"),
    "a key twice": (replaced("backend: onnx", "backend: jit, backend: onnx"), "backend: jit"),
    "a tag": (replaced("models:", "models: !!python/object/apply:os.system [true]\nmore:"), "!!python/object"),
    "an anchor": (replaced("models:", "more: &a [1]\nstill: *a\nmodels:"), "more:"),
    "a bomb": (
        beside(
            "leapp.yaml", "a: &a [x]\n" + "".join(f"{c}: &{c} [*{b}, *{b}]\n" for b, c in pairwise("abcdefghij" * 1))
        ),
        "a: &a",
    ),
    "a huge file": (lambda folder: os.truncate(folder / "leapp.yaml", 1 << 30), "has 1073741824 bytes"),
    "another text": (beside("leapp.yaml", "hello"), "hello"),
    "nothing": (beside("leapp.yaml", ""), "nothing"),
    "no description": (lambda folder: (folder / "leapp.yaml").unlink(), "leapp.yaml"),
    "another memory": (beside("leapp_initial_values.safetensors", "x"), "leapp_initial_values.safetensors"),
    "a pickle for the model": (
        lambda folder: (folder / "leapp.onnx").write_bytes(pickle.dumps(1)) and None,
        "leapp.yaml",
    ),
    "weights beside it": (with_weights_in("weights"), "external data"),
    "weights elsewhere": (with_weights_in("../weights"), "external data"),
    "weights at an absolute path": (with_weights_in("{}/weights"), "external data"),
    "a custom operator": (with_operator("custom", "Run"), "custom:Run"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_bundle_is_refused_by_name_and_never_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a leapp that would load any file that its description names."""
    pytest.importorskip("onnxruntime")
    loaded: list[str] = []
    leapp = types.ModuleType("leapp", "stands for the package")
    leapp.InferenceManager = loaded.append  # type: ignore[attr-defined]
    leapp.__spec__ = importlib.machinery.ModuleSpec("leapp", None)
    (folder := tmp_path / "bundle").mkdir()
    written(folder)
    change, text = FORGED[kind]
    change(folder)
    monkeypatch.chdir(folder)  # where weights in other files would be looked for
    if kind != "a custom operator":
        monkeypatch.setitem(sys.modules, "leapp", leapp)
    with pytest.raises(Exception, match=text):
        load_bundle(folder, None, VERSIONS)
    assert not loaded
