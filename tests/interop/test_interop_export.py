"""Exports: every format answers as JAX does, a wrong one is never written, a changed one is found."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import runpy
import stat
import sys
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from case_tables import cases, refused
from exports import (
    HERE,
    ROOT,
    add_to_weight,
    case_of,
    certificate,
    contract_of,
    copy_of,
    needs,
    one_batch_size,
    rewrite,
    run_without,
    save_run,
    seal,
    skip_without_formats,
    verify_without,
)
from tiny import tiny
from toy_policies import ORIGIN, Toy, policy_for

from ejax.config import parse_config
from ejax.envs.actions import action_form, to_action
from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.grasp_task import ROBOT_NUMBERS
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.play.saved_policy import evaluate_run
from ejax.policies.mlp import ACTIVATIONS
from ejax.run import train
from ejax.store.run_dir import RunDirectory, open_policy_run
from interop import onnx_policy
from interop.artefacts.cases import observe_env
from interop.artefacts.contract import make_contract
from interop.artefacts.episode import reference_episode
from interop.artefacts.formats import FORMATS, Trained
from interop.artefacts.parity import allowed_error
from interop.checkpoints.weights import state_dict_from_params
from interop.export import evaluations_of, export_policy, export_run, main
from interop.exporters.record import actor_function, exporter_of, spec_of
from interop.standalone_verify import Case, ParityError, compare, sha256
from interop.standalone_verify import main as standalone_main
from interop.twin.spec import NetworkSpec, PolicySpec
from interop.verify import main as verify_main
from interop.verify import verify

needs_torch, needs_onnx, needs_stablehlo = needs("pt"), needs("onnx"), needs("stablehlo")


def writable(*formats: str) -> list[str]:
    return [name for name in formats if name in HERE]


def trained_policy(policy: Any, params: Any, env: Any) -> Trained:
    spec = spec_of(policy, env)
    function = actor_function(exporter_of(policy), policy, params, spec)
    return Trained(function, spec, state_dict_from_params(policy, params), 0)


BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,))
DRAWN = {
    "cube_position_range": [[-0.1, -0.1, 0.0], [0.1, 0.1, 0.0]],
    "goal_position_range": [[-0.1, -0.1, 0.0], [0.1, 0.1, 0.0]],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run as if after one update of PushCube, which would only take time. Its starts are drawn."""
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "relu"}}
    config = {
        "trainer": {
            "exp_name": "tiny",
            "learning_env": {"name": "PushCubeRL", "cfg": {"episode_length": 20, "action_scale": 0.3, **DRAWN}},
            "num_envs": 4,
            "buffer_size": 8,
            "iterations": 1,
            "enable_eval": False,
            "console": False,
        },
        "policy": {"name": "actor_critic", "actor": network, "critic": network},
        "algorithm": {"name": "ppo", "cfg": {"batch_size": 32, "n_epochs": 1}},
    }
    return save_run(parse_config(config), tmp_path_factory.mktemp("tiny") / "run")


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    """Export all formats that can be written here."""
    skip_without_formats()
    directory = run.parent / "exported"
    export_run(run, directory, HERE)
    return directory


def test_every_format_passes_and_the_certificate_says_how(exported: Path) -> None:
    report = certificate(exported)
    assert list(report["artefacts"]) == HERE
    assert report["checkpoint"] == "tiny_step_32"
    assert {"python", "jax", "numpy"} <= report["versions"].keys()
    assert set(report["rows"]) == {"environment", "edges", "zeros", "huge", "not_a_number"}
    for facts in report["artefacts"].values():
        assert 0.0 <= facts["of_allowed"] <= 1.0
        assert facts["cases"]["environment"]["action"]["max_abs"] < 1e-6
    files = {file.name for file in exported.iterdir()} - {"parity.json"}
    assert report["sha256"] == {name: sha256(exported / name) for name in files}


def test_the_certificate_has_what_the_checkpoint_was_evaluated_with(tmp_path: Path) -> None:
    run, folder = RunDirectory(tmp_path, "tiny"), tmp_path / "evaluations"
    folder.mkdir()
    numbers = {"eval/success_rate": 0.5, "eval/avg_reward": 2.0}
    last = {**numbers, "checkpoint": "", "step": 32, "seeds": [1], "episodes": 100}
    for name, facts in {
        "fresh_last": last,
        "fresh_best": last | {"step": 16, "episodes": 999},  # another checkpoint
        "tiny_step_32": {"episodes": 50, "eval/success_rate": 0.1},
        "tiny_step_32_samples": {"episodes": 50, "eval/success_rate": 0.4, "per_episode": {}},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(facts))
    assert evaluations_of(run, tmp_path / "tiny_step_32", 32) == {
        "mode": {**numbers, "episodes": 100},
        "samples": {"episodes": 50, "eval/success_rate": 0.4},
    }
    assert not evaluations_of(run, tmp_path / "tiny_step_64", 64)
    shipped = open_policy_run(Path("point_mass"))[0]
    found = evaluations_of(shipped, shipped.find("latest", print), 0)
    assert (
        [*found] == ["mode", "samples"] and found["mode"]["episodes"] == 1000 and found["mode"]["eval/avg_reward"] < 0
    )


def test_every_file_has_the_mode_that_the_umask_leaves(exported: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in exported.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)


def test_the_contract_tells_names_units_ranges_and_rate(exported: Path) -> None:
    contract = contract_of(exported)
    (obs,) = contract["observation"]
    assert (obs["name"], obs["shape"], obs["dtype"]) == ("obs", ["batch", 15], "float32")
    assert obs["features"][0] == {"name": "shoulder_pan angle", "unit": "rad"}
    assert obs["features"][14] == {"name": "goal z", "unit": "m"}
    assert len(obs["features"]) == len(obs["low"]) == len(obs["high"]) == 15
    assert contract["control_rate_hz"] == 25.0
    assert contract["env"]["parameters"]["action_scale"] == 0.3
    assert [output["name"] for output in contract["outputs"]] == ["action", "mean", "log_std"]
    assert contract["action"]["low"] == [-0.5] * 6


def test_verify_passes_again(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_main([str(exported)]) == 0
    assert sha256(exported / "parity.json") in capsys.readouterr().out


@needs_stablehlo
def test_verify_runs_without_jax_and_says_what_it_skipped(exported: Path) -> None:
    done = verify_without(("jax", "ejax", "flax"), exported)
    assert done.returncode == (3 if HERE == ["stablehlo"] else 0), done.stderr  # 3: nothing else could be run
    assert re.search(r"stablehlo +skipped: not installed here; pip install jax", done.stdout)
    assert done.stdout.count("skipped") == 1


@pytest.mark.parametrize("name", [pytest.param(x, marks=needs(x)) for x in ("safetensors", "onnx")])
def test_one_changed_weight_is_found_even_under_a_new_hash(exported: Path, tmp_path: Path, name: str) -> None:
    directory = copy_of(exported, tmp_path / "tampered")
    file = directory / FORMATS[name].file
    add_to_weight(file, "actor.0.bias", (6,))
    refused(verify, directory, match=f"changed since the export: {file.name}", error=ParityError)
    seal(directory, file.name)
    refused(verify, directory, match=f"{name}: .* times what is allowed", error=ParityError)
    assert verify_main([str(directory)]) == 1


def test_a_missing_file_is_found(exported: Path, tmp_path: Path) -> None:
    directory = copy_of(exported, tmp_path / "incomplete")
    (directory / "contract.json").unlink()
    refused(verify, directory, match=r"contract\.json", error=ParityError)


def test_what_is_no_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_main([str(tmp_path)]) == 2
    assert "parity.json: use a folder that ejax export" in capsys.readouterr().err


def test_a_deprecated_format_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parity.json").write_text("{}")
    (tmp_path / "contract.json").write_text('{"action": {}}')
    report = {"artefacts": {name: {"skipped": ""} for name in ("pt", "torchscript")}, "clipping": "none"}
    monkeypatch.setattr("interop.export.export_run", lambda *args, **kwargs: report)
    assert main(["run", "--to", str(tmp_path)]) == 0
    (notice,) = capsys.readouterr().err.splitlines()
    assert notice.startswith("ejax export: torchscript is deprecated: torch itself deprecates TorchScript")


@needs_stablehlo
def test_a_mismatch_fails_the_export_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_another_policy(path: Path, trained: Any) -> None:
        params = jax.tree.map(lambda x: x * 1.001, *trained.function.args)
        good(path, dataclasses.replace(trained, function=functools.partial(trained.function.func, params)))

    good = FORMATS["stablehlo"].write
    monkeypatch.setitem(FORMATS, "stablehlo", dataclasses.replace(FORMATS["stablehlo"], write=write_another_policy))
    arguments = [str(run), "--to", str(tmp_path / "out"), "--formats", "stablehlo"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "not the policy that was certified" in error
    assert re.search(r"stablehlo: .*mean of 'environment' is off by .* times what is allowed", error)
    assert list(tmp_path.iterdir()) == []


@needs_stablehlo
def test_a_missing_package_is_named_and_other_formats_go_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    arguments = [str(run), "--to", str(tmp_path / "out"), "--formats"]
    assert main([*arguments, "pt,stablehlo,pt2"]) == 2
    text = "needed for pt, pt2: pip install torch, or leave them out: --formats stablehlo"
    assert text in capsys.readouterr().err
    assert main([*arguments, "stablehlo"]) == 0


def test_an_unknown_format_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--to", str(tmp_path / "out"), "--formats", "tflite"]) == 2
    assert "unknown tflite; allowed: pt, safetensors, pt2, onnx, torchscript, stablehlo" in capsys.readouterr().err


@needs_stablehlo
def test_a_folder_with_files_is_not_overwritten(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main([str(run), "--to", str(tmp_path), "--formats", "stablehlo"]) == 2
    assert "holds files already, such as mine" in capsys.readouterr().err
    (tmp_path / "link").symlink_to("none")
    assert main([str(run), "--to", str(tmp_path / "link"), "--formats", "stablehlo"]) == 2
    assert "is a link" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), "--to", str(tmp_path / "mine" / "out"), "--formats", "stablehlo"])
    assert "mine is a file, where a folder must be" in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 2


@needs_onnx
@pytest.mark.slow_cases("relu", "silu", "swish", "none", "tanh")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_onnx_of_each_activation(activation: str, tmp_path: Path) -> None:
    env = PointMassRL()
    policy, params = policy_for(env, activation=activation, use_layernorm=True, last_activation=activation)
    trained = trained_policy(policy, params, env)
    FORMATS["onnx"].write(tmp_path / "policy.onnx", trained)
    obs = 2.0 * jax.random.normal(jax.random.key(0), (7, 14))
    distribution, _ = policy.apply(params, obs)
    action, mean, log_std = FORMATS["onnx"].load(tmp_path / "policy.onnx", trained.spec)([np.asarray(obs)])
    np.testing.assert_allclose(action, distribution.mode(), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(mean, distribution.mean, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(log_std, distribution.log_std)


@needs_torch
def test_an_approximated_gelu_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from interop.twin import networks

    wrong = functools.partial(torch.nn.GELU, approximate="tanh")
    monkeypatch.setitem(networks.ACTIVATIONS, "gelu", wrong)
    env = Toy(BOX)
    policy, params = policy_for(env, activation="gelu")
    with pytest.raises(ParityError, match=r"pt: .*'environment' is off by .*, \d\d+ times what is allowed"):
        export_policy(policy, params, env, tmp_path / "out", ["pt"], origin=ORIGIN)


def test_the_contract_says_which_input_is_text() -> None:
    env = InstructedPlaceRL(physics="mujoco")
    network = NetworkSpec(
        inputs=("state", "instruction"),
        normalized=False,
        hidden_sizes=(8,),
        activation="relu",
        last_activation=None,
        use_layernorm=False,
        dropout_p=0.0,
    )
    widths = {"goal": 6, "instruction": 64, "scene": 21, "state": 11}
    spec = PolicySpec(observation=widths, actor=network, critic=None, head="normal", sizes=(4,))
    seen = {name: np.zeros((1, width), np.float32) for name, width in widths.items()}
    contract = make_contract({"id": "InstructedPlaceRL", "cfg": {}}, env, spec, seen, "none")
    state, instruction = contract["observation"]
    assert [feature["name"] for feature in state["features"]] == list(ROBOT_NUMBERS) and "text" not in state
    assert instruction["text"] == {"encoding": "utf-8", "length": 64} and instruction["features"] is None
    assert "then zeros" in instruction["meaning"] and instruction["shape"] == ["batch", 64]


@pytest.mark.slow
@needs_onnx
@cases(
    "space",
    BOX,
    gymnasium.spaces.Discrete(3),
    gymnasium.spaces.MultiDiscrete([2, 3]),
    ids=["tanh_normal", "categorical", "multi_categorical"],
)
def test_each_head_with_a_nested_observation(
    space: gymnasium.Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_batch_size(monkeypatch)
    env = Toy(space)
    report = export_policy(*policy_for(env, squash=space is BOX), env, tmp_path / "out", HERE, origin=ORIGIN)
    assert report["clipping"].startswith("none") and verify(tmp_path / "out").keys() == set(HERE)
    contract = contract_of(tmp_path / "out")
    assert [part["name"] for part in contract["observation"]] == ["robot.q", "robot.v"]  # not what the critic sees
    assert contract["observation"][1]["high"] == [9.0, 9.0]
    case = case_of(tmp_path / "out", "environment")
    action = onnx_policy.load_policy(tmp_path / "out").act(case.observation)
    assert action.dtype == case.expected["action"].dtype
    np.testing.assert_allclose(action, case.expected["action"], atol=1e-5)


HALF = gymnasium.spaces.Box(np.array([-0.1, -np.inf], np.float32), np.array([np.inf, 0.1], np.float32))


@pytest.mark.slow
@needs_stablehlo
@cases(
    "space",
    HALF,
    gymnasium.spaces.Box(-2, 3, (2,), np.int64),
    gymnasium.spaces.Box(0, 255, (2,), np.uint8),
    gymnasium.spaces.Box(-0.5, 0.5, ()),
    gymnasium.spaces.Discrete(3, start=-1),
    gymnasium.spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 2], [3, -4]]),
    ids=["half-bounded", "integers", "bytes", "no axes", "start", "table"],
)
def test_an_export_acts_as_the_run_does(space: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every format, for actions beyond each finite bound too; and the standalone verifier takes them."""
    one_batch_size(monkeypatch)
    env = Toy(space)
    monkeypatch.setattr(Toy, "clip_actions", True, raising=False)  # its word for it
    policy, params = policy_for(env)
    params["params"]["actor"]["linear_2"]["kernel"] *= 2000.0
    formats = writable("pt", "onnx", "stablehlo")
    export_policy(policy, params, env, tmp_path / "out", formats, origin=ORIGIN)
    verify(tmp_path / "out")
    contract = contract_of(tmp_path / "out")["action"]
    assert contract["shape"] == list(space.shape) and contract["dtype"] == str(space.dtype)
    form = action_form(space, clips=True)
    with np.load(tmp_path / "out" / "observations.npz") as file:
        q, v, action = (
            file[f"huge/{name}"] for name in ("observation/robot.q", "observation/robot.v", "expected/action")
        )
    obs = {"robot": {"q": q, "v": v}, "hidden": np.zeros((len(q), 1), np.float32)}
    numbers = policy.apply(params, obs)[0].mode()
    expected = to_action(form, numbers)  # as ``Actor.answer``
    if isinstance(space, gymnasium.spaces.Box):
        far, low, high = np.asarray(numbers).reshape(len(q), -1), space.low.ravel(), space.high.ravel()
        assert (far < low).any(axis=0)[np.isfinite(low)].all() and (far > high).any(axis=0)[np.isfinite(high)].all()
    np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-4)
    if "onnx" in formats:
        assert np.shape(onnx_policy.load_policy(tmp_path / "out").act(obs)) == expected.shape
        assert standalone_main([str(tmp_path / "out")]) == 0
    if "pt" in formats:
        from interop.policy import load_policy

        given = load_policy(tmp_path / "out").act(obs)
        np.testing.assert_allclose(given, expected, rtol=1e-3, atol=1e-3)


@needs_torch
@cases(
    "space start",
    (gymnasium.spaces.Discrete(3, start=-1), [0]),
    (gymnasium.spaces.MultiDiscrete([3, 2], start=[1, 5]), [0, 0]),
    ids=["discrete", "multi_discrete"],
)
def test_a_start_that_is_not_the_policys_is_found(space: Any, start: list[int], tmp_path: Path) -> None:
    """Callers go by ``contract.json``."""
    env = Toy(space)
    export_policy(*policy_for(env), env, tmp_path / "out", ["pt"], origin=ORIGIN)
    assert verify_main([str(tmp_path / "out")]) == 0
    rewrite(tmp_path / "out", "contract.json", lambda contract: contract["action"].update(start=start))
    assert verify_main([str(tmp_path / "out")]) == 1


@needs_torch
def test_a_name_that_exports_reserve_is_refused_also_for_the_critic_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"robot": Toy.observation_space["robot"], "memory": Toy.observation_space["hidden"]}
    monkeypatch.setattr(Toy, "observation_space", gymnasium.spaces.Dict(parts))
    monkeypatch.setattr(Toy, "_observe", lambda self, x: {"robot": {"q": x[:3], "v": x[3:5]}, "memory": x[5:]})
    env = Toy(BOX)
    with pytest.raises(ValueError, match="reserves the names memory; rename"):
        export_policy(*policy_for(env), env, tmp_path / "out", ["pt"], origin=ORIGIN)


@needs_torch
def test_an_export_that_does_not_clip_where_the_run_does_is_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate compares with the run's own actions: with what ``ejax.load(run).act`` gives."""
    monkeypatch.setattr("interop.export._decide_clipping", lambda *_: (False, "none: the action space has no bounds"))
    monkeypatch.setattr(Toy, "clip_actions", True, raising=False)
    env = Toy(HALF)
    policy, params = policy_for(env)
    with pytest.raises(ParityError, match="action"):
        export_policy(policy, params, env, tmp_path / "out", ["pt"], origin=ORIGIN)


@pytest.mark.slow
@needs_stablehlo
@cases("env_clips clipping clipped", (True, "auto", True), (False, "auto", False), (False, "space", True))
def test_actions_are_clipped_where_the_env_clips_them_or_as_told(
    env_clips: bool, clipping: Any, clipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode to replay is of the trained policy, which clipping beyond the environment's is not."""
    episode = {
        "schema_version": 1,
        "about": "",
        "seed": 0,
        "start": {"x": 0.0},
        "result": {"return": 0.0, "length": 1.0},
    }
    monkeypatch.setattr("interop.export.reference_episode", lambda *_: episode)
    env = Toy(BOX, clips=env_clips)
    policy, params = policy_for(env)
    params["params"]["actor"]["linear_2"]["kernel"] *= 5.0  # modes beyond the bounds
    export_policy(policy, params, env, tmp_path / "out", ["stablehlo"], origin=ORIGIN, clipping=clipping, seed=0)
    assert contract_of(tmp_path / "out")["action"]["clipped"] == clipped
    assert (tmp_path / "out/episode.json").exists() == (env_clips or not clipped)
    with np.load(tmp_path / "out/observations.npz") as file:
        largest = np.abs(file["environment/expected/action"]).max()
    assert largest == 1.0 if clipped else largest > 1.0


@pytest.fixture(scope="module")
def measured(run: Path) -> dict[str, Any]:
    return evaluate_run(run, num_episodes=1)


@pytest.mark.slow
@pytest.mark.parametrize("clips", [True, False])
def test_an_environment_outside_jax_is_observed_as_inside(clips: bool) -> None:
    env = Toy(BOX, clips=clips)
    policy, params = policy_for(env)
    seen = observe_env(policy, PureHostEnv(env, 4), params, spec_of(policy, env))
    inside = observe_env(policy, env, params, spec_of(policy, env))
    assert {name: x.dtype for name, x in seen.items()} == {name: x.dtype for name, x in inside.items()}
    assert {name: x.shape for name, x in seen.items()} == {"hidden": (512, 1), "robot.q": (512, 3), "robot.v": (512, 2)}
    assert spec_of(policy, PureHostEnv(env, 4)) == spec_of(policy, env)


class Unsteady(PureHostEnv):
    """Starts anywhere: seeds make no difference."""

    def reset(self, seed: Any, rows: Any = None) -> Any:
        return super().reset(np.random.default_rng().integers(2**32, size=seed.shape).astype(np.uint32), rows)


@pytest.mark.slow
@pytest.mark.parametrize(("clipping", "clipped"), [("auto", False), ("space", True)])
def test_an_environment_that_does_not_say_whether_it_clips_is_no_reason_to_clip(
    clipping: Any, clipped: bool, tmp_path: Path
) -> None:
    skip_without_formats()
    env = Unsteady(Toy(BOX, clips=True), 4)
    policy, params = policy_for(env.env)
    report = export_policy(policy, params, env, tmp_path / "out", HERE[:1], origin=ORIGIN, clipping=clipping)
    assert "not known" in report["clipping"]
    assert contract_of(tmp_path / "out")["action"]["clipped"] is clipped


@pytest.mark.slow
def test_a_policy_trained_outside_jax_is_exported(tmp_path: Path) -> None:
    skip_without_formats()
    config = tiny(env="gymnasium:Pendulum-v1", env_cfg={}, exp_name="outside", iterations=1)
    run = train(parse_config(config), run_dir=tmp_path / "run").run_dir
    report = export_run(run, tmp_path / "out", HERE[:1])
    assert report["rows"]["environment"] == 16 * 128
    assert report["clipping"] == "to the action space, as the environment does"
    contract = contract_of(tmp_path / "out")
    assert contract["env"]["id"] == "gymnasium:Pendulum-v1"
    assert contract["env"]["max_episode_steps"] == 200
    (obs,) = contract["observation"]
    assert (obs["shape"], obs["high"]) == (["batch", 3], [1.0, 1.0, 8.0])
    assert (contract["action"]["low"], contract["action"]["high"]) == ([-2.0], [2.0])
    assert contract["control_rate_hz"] is None
    assert verify_main([str(tmp_path / "out")]) == 0


def test_the_reference_episode_is_the_evaluations_own(measured: dict[str, Any], exported: Path) -> None:
    episode = json.loads((exported / "episode.json").read_text())
    start, result = episode["start"], episode["result"]
    assert {name: np.shape(x) for name, x in start.items()} == {
        "episode_step": (),
        "goal": (3,),
        "physics.qpos": (13,),
        "physics.qvel": (12,),
    }
    for place, middle in ((start["physics.qpos"][6:9], (-0.6, -0.4, 0.05)), (start["goal"], (-0.9, -0.6, 0.05))):
        assert 1e-3 < np.abs(np.subtract(place, middle)).max() < 0.1  # drawn
    assert result["return"] == measured["eval/avg_reward"]
    assert result["length"] == measured["eval/avg_length"]
    assert result["metrics/distance_to_goal"] == measured["eval/metrics/distance_to_goal"]
    assert "episode.json" in certificate(exported)["sha256"]


def test_an_episode_without_an_end_is_none() -> None:
    policy, params = policy_for(Toy(BOX))
    assert reference_episode(policy, Toy(BOX), params, seed=0) is None


SCRIPTS = [
    pytest.param("deploy_torch.py", "onnxruntime", marks=needs_torch),
    pytest.param("deploy_torch.py --torchscript", "onnxruntime", marks=needs_torch),
    pytest.param("deploy_onnx.py", "torch", marks=needs_onnx),
]
"""Scripts, and the runtime that each does without."""


def deployed(exported: Path, script: str, *blocked: str) -> str:
    """Return what an example prints in a process without jax, ejax, interop and these."""
    name, *options = script.split()
    done = run_without(
        ("jax", "ejax", "flax", "interop", *blocked),
        f"""import runpy
sys.argv = [{name!r}, {str(exported)!r}, *{options!r}]
sys.path.insert(0, "examples")
runpy.run_path("examples/" + {name!r}, run_name="__main__")""",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow_cases("deploy_torch.py-onnxruntime")
@pytest.mark.parametrize(("script", "hidden"), SCRIPTS)
def test_a_deployed_policy_has_the_return_that_ejax_measured(
    measured: dict[str, Any], exported: Path, script: str, hidden: str
) -> None:
    """To 1e-4: over 20 steps an action that is off by 1e-6 turns a joint by up to 20·0.3·1e-6 rad. That moves the tool,
    1.2 m away, by 7e-6 m, and the reward of each step by up to 0.1·5 times that."""
    found = deployed(exported, script, hidden)
    pattern = r"return (\S+)  length (\d+)  success (\w+)  distance_to_goal (\S+)$"
    here, there = (re.search(who + pattern, found, re.MULTILINE) for who in ("^", "^by JAX "))
    assert here and there, found
    for each, tolerance in ((here, 1e-4), (there, 1e-5)):  # the latter is printed, no more
        assert float(each[1]) == pytest.approx(measured["eval/avg_reward"], abs=tolerance)
        assert int(each[2]) == measured["eval/avg_length"]
        assert (each[3] == "True") == bool(measured["eval/success_rate"])
        assert float(each[4]) == pytest.approx(measured["eval/metrics/distance_to_goal"], abs=tolerance)


@pytest.mark.slow_cases("torch.py")
@pytest.mark.parametrize(("script", "hidden"), [SCRIPTS[0], SCRIPTS[2]])
def test_a_deployed_policy_needs_no_more_than_its_runtime(exported: Path, script: str, hidden: str) -> None:
    printed = deployed(exported, script, hidden, "mujoco", "gymnasium", "pydantic")
    assert "mujoco is not installed" in printed
    found = re.search(r"(\d+) observations, largest difference from JAX's actions (\S+)$", printed.strip())
    assert found and int(found[1]) == 256 and float(found[2]) < 1e-4, printed


@needs_onnx
def test_any_task_is_driven_by_what_its_contract_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = CartPoleRL(max_episode_steps=11)
    policy, params = policy_for(env)
    origin = {**ORIGIN, "env": {"id": "CartPoleRL", "cfg": {"max_episode_steps": 11}}}
    export_policy(policy, params, env, tmp_path / "out", ["onnx"], origin=origin, seed=3)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["deploy_onnx.py", str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples/deploy_onnx.py"), run_name="__main__")
    here, there = capsys.readouterr().out.splitlines()
    assert there == f"by JAX {here}"  # eleven steps of the same physics, to 1e-5
    assert float(here.split()[1]) > 0.0


def test_an_environment_outside_jax_is_driven_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    play = importlib.import_module("deployed_task").play
    entry: dict[str, Any] = {"name": "obs", "dtype": "float32", "entries": [2, 0]}
    env = {"id": "gymnasium:CartPole-v1", "cfg": {}, "max_episode_steps": 500}
    contract = {"env": env, "observation": [entry], "action": {}}
    (tmp_path / "contract.json").write_text(json.dumps(contract))
    seen = []

    def act(obs: Any) -> Any:
        seen.append(obs["obs"])
        return np.array([0])

    play(tmp_path, act)
    twin = gymnasium.make("CartPole-v1")
    np.testing.assert_array_equal(seen[0], twin.reset(seed=0)[0][None, [2, 0]])
    length = next(t for t in range(1, 500) if twin.step(0)[2])
    assert capsys.readouterr().out == f"return {length:.5f}  length {length}\n"
    (tmp_path / "contract.json").write_text(json.dumps({**contract, "observation": [entry | {"text": {}}]}))
    refused(play, tmp_path, act, word="reads text: drive it with examples/deploy_vla.py")


def spec(head: Any = "normal", sizes: tuple[int, ...] = (2,)) -> PolicySpec:
    actor = NetworkSpec(
        inputs=("obs",),
        normalized=False,
        hidden_sizes=(4,),
        activation="relu",
        last_activation=None,
        use_layernorm=False,
        dropout_p=0.0,
    )
    return PolicySpec(observation={"obs": 1}, actor=actor, critic=None, head=head, sizes=sizes)


def constant_case(**expected: Any) -> Case:
    arrays = {name: np.asarray(x) for name, x in expected.items()}
    rows = len(arrays["action"])
    allowed = {name: np.full((rows, 1), 1e-6, np.float32) for name in arrays}
    return Case("fixed", {"obs": np.zeros((rows, 1), np.float32)}, arrays, allowed)


def test_errors_are_counted_in_float32_steps() -> None:
    y = np.array([[1.0, -1e-3]], np.float32)
    case = constant_case(action=y, mean=y, log_std=y)
    moved = np.nextafter(np.nextafter(y, np.float32(2.0)), np.float32(2.0))
    errors = compare(lambda leaves: [y, moved, y], case, spec())
    assert errors["action"] == {"max_abs": 0.0, "max_rel": 0.0, "max_ulp": 0.0, "max_row_ulp": 0.0, "of_allowed": 0.0}
    assert errors["mean"]["max_ulp"] == 2.0
    assert errors["mean"]["max_row_ulp"] == 2.0  # in the spacing at 1, the row's largest
    assert errors["mean"]["max_abs"] == 2.0**-22
    assert errors["mean"]["of_allowed"] == pytest.approx(2.0**-22 / 1e-6)


def test_zeros_of_both_signs_are_the_same_number() -> None:
    zero = np.zeros((1, 2), np.float32)
    errors = compare(lambda leaves: [-zero, zero, zero], constant_case(action=zero, mean=zero, log_std=zero), spec())
    assert errors["action"]["max_ulp"] == 0.0


def test_a_hidden_nan_is_a_mismatch() -> None:
    nan, zero = np.array([[np.nan, 0.0]], np.float32), np.zeros((1, 2), np.float32)
    case = constant_case(action=nan, mean=nan, log_std=zero)
    assert compare(lambda leaves: [nan, nan, zero], case, spec())["action"]["of_allowed"] == 0.0
    with pytest.raises(ParityError, match="the certificate has"):
        compare(lambda leaves: [zero, nan, zero], case, spec())


def test_a_wrong_shape_or_dtype_is_a_mismatch() -> None:
    zero = np.zeros((1, 2), np.float32)
    case = constant_case(action=zero, mean=zero, log_std=zero)
    with pytest.raises(ParityError, match=r"is float32\[2\] in a batch of 1, the certificate has float32\[1, 2\]"):
        compare(lambda leaves: [zero[0], zero, zero], case, spec())
    with pytest.raises(ParityError, match="float64"):
        compare(lambda leaves: [zero.astype(np.float64), zero, zero], case, spec())


def test_another_choice_counts_only_if_it_was_not_a_tie() -> None:
    logits = np.array([[1.0, 1.0 + 1e-7, 0.5]], np.float32)
    case = constant_case(action=np.array([1], np.int32), logits=logits)
    tied, worse, outside = (np.array([i], np.int32) for i in (0, 2, 7))
    categorical = spec("categorical", (3,))
    assert compare(lambda leaves: [tied, logits], case, categorical)["action"]["of_allowed"] < 1.0
    assert compare(lambda leaves: [worse, logits], case, categorical)["action"]["of_allowed"] > 1.0
    assert compare(lambda leaves: [outside, logits], case, categorical)["action"]["of_allowed"] == np.inf


def test_what_is_allowed_follows_each_rows_sensitivity_and_size() -> None:
    y = np.array([[1.0, 100.0], [0.5, 0.0], [0.5, np.nan]], np.float32)
    sensitivity = np.array([[0.0, 1e-5], [1e-3, 0.0], [1e-9, np.nan]])
    np.testing.assert_allclose(allowed_error(y, sensitivity), [[100.0 * 2.0**-19], [4e-3], [2.0**-19]], rtol=1e-6)


def test_a_format_has_a_line_with_its_error_over_the_actions_range(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_main([str(exported), "--trust"]) == 0
    line = r"^PASS \w+ +actions differ by at most (\S+) of the action's range; \d+% of what is allowed$"
    found = re.findall(line, capsys.readouterr().out, re.MULTILINE)
    assert len(found) == len(HERE) and all(0.0 <= float(error) < 1e-4 for error in found)
    assert verify_main([str(exported), "--trust", "-v"]) == 0 and "ULP of row" in capsys.readouterr().out


@needs_torch
def test_the_loader_beside_the_weights_needs_no_ejax(exported: Path) -> None:
    code = f"""import runpy, sys
sys.argv, sys.path[:1] = ["deploy_torch.py", {str(exported)!r}, "--pt"], [{str(ROOT / "examples")!r}]
runpy.run_path({str(ROOT / "examples" / "deploy_torch.py")!r}, run_name="__main__")
import interop
assert {str(exported)!r} in interop.__file__, interop.__file__"""
    done = run_without(("jax", "ejax", "flax", "onnxruntime", "mujoco"), code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5
