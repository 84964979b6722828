"""Exports of policies with memory: what they remember goes in and out, over a thousand steps."""

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from case_tables import refused
from exports import HERE, ROOT, case_of, certificate, contract_of, needs
from memory_runs import MEMORIES, make_run

pytest.importorskip("torch")

import torch

from ejax.config import parse_config
from ejax.training.build import build
from interop.artefacts.cases import CONSECUTIVE
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params
from interop.embodichain import export_pt
from interop.export import export_run
from interop.policy import deployed, load_policy, load_state_dict, make_policy
from interop.serving.policies import load_served
from interop.standalone_verify import compare, load_cases
from interop.twin.kinds import load_spec
from interop.verify import verify


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.slow] if kind != "gru" else []) for kind in MEMORIES]
)
def exported(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """``(kind, run, export)``: of one kind in all formats that can be written here, of the others in those that are
    spelt out for each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    run = make_run(folder, request.param)
    export_run(run, folder / "exported", HERE if request.param == "lstm" else [x for x in HERE if x in ("pt", "onnx")])
    return request.param, run, folder / "exported"


def test_every_format_remembers_as_jax_does_over_a_thousand_steps(exported: Any) -> None:
    _, _, directory = exported
    report = certificate(directory)
    assert report["rows"][CONSECUTIVE] == 1000
    for facts in report["artefacts"].values():
        errors = facts["cases"][CONSECUTIVE]
        assert set(errors) == {"action", "mean", "log_std", "next_memory"}
        assert max(each["of_allowed"] for each in errors.values()) <= 1.0
    starts = ~case_of(directory, CONSECUTIVE).observation["memory"].any(axis=1)
    assert 50 < starts.sum() < 200  # episodes of eleven steps
    assert all("problem" not in facts for facts in verify(directory).values())


def test_a_policy_that_forgets_or_never_forgets_is_a_mismatch(exported: Any) -> None:
    _, _, directory = exported
    spec = load_spec(directory / "policy.json")
    case = case_of(directory, CONSECUTIVE)
    twin = deployed(spec, load_state_dict(directory / "policy.pt"))

    def run(leaves: list[Any], spoil: float = 1.0) -> list[Any]:
        with torch.no_grad():
            *outputs, memory = (y.numpy() for y in twin(*map(torch.tensor, leaves)))
        return [*outputs, (memory * np.float32(spoil)).astype(np.float32)]

    assert max(errors["of_allowed"] for errors in compare(run, case, spec).values()) <= 1.0
    for spoil in (0.0, 0.999):
        worse = compare(lambda leaves, spoil=spoil: run(leaves, spoil), case, spec)
        assert worse["next_memory"]["of_allowed"] > 10.0


def test_the_contract_says_what_to_feed_back_and_how_to_reset(exported: Any) -> None:
    kind, _, directory = exported
    contract = contract_of(directory)
    size = {"gru": 10, "lstm": 10, "history": 3 * contract["observation"][0]["shape"][1] + 1}[kind]
    memory = contract["observation"][-1]
    assert (memory["name"], memory["shape"], memory["reset"], memory["next"]) == (
        *("memory", ["batch", size], 0.0, "next_memory"),
    )
    assert contract["outputs"][-1]["shape"] == ["batch", size]


@pytest.mark.parametrize("module", ["policy", pytest.param("onnx_policy", marks=needs("onnx"))])
def test_a_loaded_policy_remembers_by_itself_until_it_is_reset(module: str, exported: Any) -> None:
    _, _, directory = exported
    load_policy = importlib.import_module(f"interop.{module}").load_policy
    case = case_of(directory, CONSECUTIVE)
    policy = load_policy(directory)
    steps = case.observation["obs"][:30]
    starts = ~case.observation["memory"].any(axis=1)
    for t, obs in enumerate(steps):
        if starts[t]:
            policy.reset()
        np.testing.assert_allclose(policy.act(obs), case.expected["action"][t], atol=1e-4)
    policy.reset()
    policy.act(np.stack([steps[1], steps[1]]))
    policy.reset(np.array([False, True]))
    together = np.stack([steps[0], steps[0]])
    first, second = policy.act(together)
    np.testing.assert_allclose(second, case.expected["action"][0], atol=1e-4)
    assert np.abs(first - second).max() > 1e-3  # the other row remembers
    refused(policy.act, np.stack([steps[0]] * 3), word="remembers a batch of [2], but got [3]; call reset()")


@needs("onnx")
def test_a_run_and_its_export_are_served_alike(exported: Any) -> None:
    _, run, directory = exported
    served = load_served(directory), load_served(run)
    memories = [policy.first_memory for policy in served]
    for obs in next(case for case in load_cases(directory / "observations.npz")).observation["obs"][:10]:
        answers = [policy.act(policy.leaves({"obs": obs}), memories[i]) for i, policy in enumerate(served)]
        memories = [memory for _, memory in answers]
        # the export clips, and the environment of the run
        np.testing.assert_allclose(answers[0][0], np.clip(answers[1][0], -1.0, 1.0), atol=1e-5)
    of_export, of_run = (policy.contract for policy in served)
    assert all(of_run[name] == of_export[name] for name in ("env", "control_rate_hz"))
    assert all(of_run["action"][name] == of_export["action"][name] for name in ("features", "low", "high"))
    assert of_run["observation"][0].items() <= of_export["observation"][0].items()


DEPLOYED = {"deploy_torch": "policy.pt2", "deploy_onnx": "policy.onnx", "deploy_stablehlo": "policy.stablehlo"}


@pytest.mark.parametrize("script", DEPLOYED)
def test_a_deployed_policy_remembers_as_it_did_in_jax(
    script: str, exported: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, directory = exported
    if not (directory / DEPLOYED[script]).exists():
        pytest.skip("not exported in this format")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", str(directory)])
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    here, there = (float(line.split("return ")[1].split()[0]) for line in capsys.readouterr().out.splitlines())
    assert here == pytest.approx(there, abs=2e-4)
    monkeypatch.setitem(sys.modules, "ejax.rollout", None)
    runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    found = capsys.readouterr().out
    assert "ejax.rollout is not installed" in found and float(found.split()[-1]) < 1e-5


def test_a_policy_with_memory_has_no_interface_without_it(exported: Any) -> None:
    policy, together = load_policy(exported[2]), np.zeros((2, 6), np.float32)
    refused(policy.get_action, {"obs": together}, word="is called by act")
    refused(policy.get_value, together, word="is called by act")


def test_weights_come_back_and_are_torchs_own(exported: Any) -> None:
    kind, run, directory = exported
    config = parse_config(json.loads((run / "configs" / "resolved.json").read_text()))
    parts = build(config)
    state_dict = state_dict_from_params(parts.policy, parts.state.train.params)
    back = params_from_state_dict(parts.policy, state_dict)
    chex.assert_trees_all_equal(back, parts.state.train.params)
    spec = load_spec(directory / "policy.json")
    twin = make_policy(spec, state_dict)
    assert [name for name, _ in twin.named_parameters()] == [name for name in state_dict if "normalizer" not in name]
    if kind != "history":
        assert isinstance(twin.actor_memory, torch.nn.GRU if kind == "gru" else torch.nn.LSTM)


def test_embodichain_has_no_place_for_a_memory(exported: Any, tmp_path: Path) -> None:
    _, run, _ = exported
    with pytest.raises(TypeError, match="EmbodiChain's policies have no memory, and its files no place for one"):
        export_pt(run, tmp_path / "policy.pt")
