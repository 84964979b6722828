"""EmbodiChain's checkpoints: read from each version, trained on from, written so that it goes on from them."""

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.algorithms.ppo import ppo_update
from ejax.config import ConfigError, RunConfig, parse_config
from ejax.distributions import ActionSpec
from ejax.optim import bind_schedule
from ejax.policies import ActorCritic, NetworkConfig, get_action
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint
from ejax.store.run_dir import RunDirectory, create_run_directory, open_run_directory
from ejax.train import main
from ejax.training.build import build
from ejax.training.parts import Parts, rows_per_update
from ejax.training.warm_start import start_from_policy
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params
from interop.tensordict import rollout_from_dict

torch = pytest.importorskip("torch", reason="checkpoints of EmbodiChain are torch's")
embodichain = pytest.importorskip("interop.embodichain")
pt_file = pytest.importorskip("interop.checkpoints.file")
pt_state = pytest.importorskip("interop.checkpoints.state")

GOLDEN = Path(__file__).parents[1] / "golden"
POINT_MASS = GOLDEN / "embodichain_0_3_point_mass.pt"
SEED = GOLDEN / "seed_actor_critic_step_1234.pt"
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(POINT_MASS.with_suffix(".npz")) as file:
        return dict(file)


def options(golden: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Make the golden training's config, as EmbodiChain 0.3 computes."""
    raw = json.loads(str(golden["config"]))
    raw |= {"compat": "embodichain-0.3", "trainer": {**raw["trainer"], "console": False}}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        raw[section][key] = value
    return raw


def config_file(golden: dict[str, Any], folder: Path) -> Path:
    (folder / "train.json").write_text(json.dumps(options(golden)))
    return folder / "train.json"


def written(to: Path, config: RunConfig, parts: Parts, state: Any, num_updates: int, **how: Any) -> Path:
    """Write a run's state as EmbodiChain's file."""
    meta = {"global_step": 64 * num_updates, "num_updates": num_updates, "best_eval_value": how.pop("best", None)}
    return pt_file.write_pt(to / "a.pt", pt_state.pt_payload(config, parts, state, meta, **how))


@pytest.fixture(scope="module")
def config(golden: dict[str, Any]) -> RunConfig:
    return parse_config(options(golden))


@pytest.fixture(scope="module")
def parts(config: RunConfig) -> Parts:
    return build(config)


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit; a standard deviation only to rounding: torch's √ is not NumPy's."""
    a, b = ({jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)} for tree in (a, b))
    assert a.keys() == b.keys()
    for name, x in a.items():
        rtol = 2e-7 if "standard_deviation" in name or name.endswith("['lr']") or isinstance(x, float) else 0
        if isinstance(x, str):
            assert x == b[name], name
        else:
            assert getattr(x, "dtype", None) == getattr(b[name], "dtype", None), name
            np.testing.assert_allclose(x, b[name], rtol=rtol, atol=0, err_msg=name)


def next_update(parts: Parts, config: RunConfig, state: Any, golden: dict[str, Any]) -> Any:
    rollout, _ = rollout_from_dict({name[8:]: x for name, x in golden.items() if name[:8] == "rollout/"}, "head")
    cfg = config.algorithm.cfg
    cfg = cfg.model_copy(update={"lr_scheduler": bind_schedule(cfg.lr_scheduler, config.trainer.num_updates)})
    return ppo_update(state.train, rollout, KEY, policy=parts.policy, optimizer=parts.optimizer, config=cfg)


def test_a_file_of_the_seed_version_acts_as_in_torch() -> None:
    """The weights do not give the activation: any will do for the comparison."""
    saved = pt_file.read_pt(SEED)
    assert saved.global_step == 1234
    assert saved.num_updates is saved.optimizer is saved.schedule_step is None
    network = NetworkConfig(hidden_sizes=(16, 8), activation="tanh")
    policy = ActorCritic(ActionSpec("normal", (2,)), network, network)
    params = params_from_state_dict(policy, saved.policy)
    assert_same(state_dict_from_params(policy, params), saved.policy)

    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    networks = {
        name: torch.nn.Sequential(linear(5, 16), tanh(), linear(16, 8), tanh(), linear(8, size))
        for name, size in (("actor", 2), ("critic", 1))
    }
    state_dict = torch.load(SEED, weights_only=True)["policy"]
    obs = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, module in networks.items():
            own = {key[len(name) + 1 :]: x for key, x in state_dict.items() if key.startswith(f"{name}.")}
            module.load_state_dict(own, strict=True)
        there, value_there = networks["actor"](obs), networks["critic"](obs)[:, 0]
    action, _, value = get_action(policy, params, obs.numpy(), KEY, deterministic=True)
    np.testing.assert_allclose(action, there, rtol=0, atol=1e-6)
    np.testing.assert_allclose(value, value_there, rtol=0, atol=1e-6)


def test_the_policy_of_0_3_acts_as_in_embodichain(golden: dict[str, Any], config: RunConfig, parts: Parts) -> None:
    state, notes = pt_state.restore(pt_file.read_pt(POINT_MASS), config, parts)
    assert notes == []
    action, _, value = get_action(parts.policy, state.train.params, golden["rollout/obs"], KEY, deterministic=True)
    np.testing.assert_allclose(action, golden["action"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(value[:, :-1], golden["rollout/value"][:, :-1], rtol=0, atol=2e-6)


def test_the_next_update_is_embodichains(golden: dict[str, Any], config: RunConfig, parts: Parts) -> None:
    """From its checkpoint (schema 2: normalizers, Adam, schedule) on the same minibatches."""
    state, _ = pt_state.restore(pt_file.read_pt(POINT_MASS), config, parts)
    assert (int(state.update), int(state.train.step)) == (2, 2)
    trained, metrics = next_update(parts, config, state, golden)
    for name in ("actor_loss", "value_loss", "entropy", "learning_rate"):
        np.testing.assert_allclose(metrics[name], golden[f"metric/{name}"], rtol=1e-4, atol=1e-6, err_msg=name)
    for key, x in state_dict_from_params(parts.policy, trained.params).items():
        np.testing.assert_allclose(x, golden[f"final/{key}"], rtol=1e-4, atol=1e-5, err_msg=key)


def test_embodichains_file_is_written_as_it_was_read(config: RunConfig, parts: Parts, tmp_path: Path) -> None:
    state, _ = pt_state.restore(pt_file.read_pt(POINT_MASS), config, parts)
    made = torch.load(written(tmp_path, config, parts, state, 2, like=POINT_MASS), weights_only=True)
    original = torch.load(POINT_MASS, weights_only=True)
    for payload in (made, original):
        del payload["rng_by_rank"]
    assert list(made["policy"]) == list(original["policy"])
    assert_same(made, dict(original))


@pytest.mark.parametrize("layout", ["0.3", "head", "seed"])
def test_what_is_written_is_read_back(layout: Any, golden: dict[str, Any], config: RunConfig, tmp_path: Path) -> None:
    raw = options(golden)
    if layout != "0.3":
        raw["policy"] |= {"actor_obs_normalization": False, "critic_obs_normalization": False}
    config = parse_config(raw)
    parts = build(config)
    opt_state = jax.tree.map(lambda x: x + jnp.ones_like(x) * 3, parts.state.train.opt_state)
    train_state = replace(parts.state.train, step=jnp.int32(3), opt_state=opt_state)
    state = replace(parts.state, update=jnp.int32(3), train=train_state)
    file = written(tmp_path, config, parts, state, 3, best=0.5, layout=layout)
    payload = torch.load(file, weights_only=True)
    keys = {"global_step", "policy"}
    if layout != "seed":
        keys |= {"best_eval_value", "optimizer", "lr_scheduler", "lr_scheduler_cfg"}
    if layout == "0.3":
        keys |= {"num_updates", "restart_schedule"}
    assert payload.keys() == keys
    back, notes = pt_state.restore(pt_file.read_pt(file), config, build(config))
    if layout == "seed":
        assert notes == ["the file has no optimizer state: the optimizer's moments start at zero"]
        assert_same(back.train.params, state.train.params)
    else:
        assert notes == []
        assert_same(back.train, state.train)
    assert int(back.update) == 3


def test_torchs_optimizer_and_scheduler_go_on_from_the_file(
    config: RunConfig, parts: Parts, golden: dict[str, Any], tmp_path: Path
) -> None:
    """Linear from 0.01 to a quarter over 4 updates: 0.01 · (1 − 0.75 · 2/4) after two, 0.01 · (1 − 0.75 · 3/4) next."""
    state, _ = pt_state.restore(pt_file.read_pt(POINT_MASS), config, parts)
    payload = torch.load(written(tmp_path, config, parts, state, 2), weights_only=True)
    trained = [torch.nn.Parameter(x) for key, x in payload["policy"].items() if "normalizer" not in key]
    optimizer = torch.optim.Adam(trained, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    scheduler.load_state_dict(payload["lr_scheduler"])
    optimizer.load_state_dict(payload["optimizer"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (1 - 0.75 * 2 / 4))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * (1 - 0.75 * 3 / 4))


@pytest.mark.slow
def test_a_run_goes_on_from_embodichains_file_and_back_into_one(
    golden: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way by the command lines: 2 updates in EmbodiChain, 2 in ejax, and a file for EmbodiChain. ``--resume``
    does in one step what a folder made of the file and ``--resume latest`` do in two; bit for bit."""
    file, run, one = config_file(golden, tmp_path), tmp_path / "run", tmp_path / "one"
    from_pt = ["from-pt", str(POINT_MASS), "--config", str(file), "--run", str(run)]
    assert embodichain.main(from_pt) == 0
    assert "note:" not in capsys.readouterr().out
    directory, config = open_run_directory(run)
    result = train(config, resume="latest", run_dir=run)
    assert (result.num_updates, result.global_step, result.finished) == (4, 256, True)
    assert [entry["global_step"] for entry in result.train_history] == [192, 256]
    assert result.last_train_metrics["train/learning_rate"] == pytest.approx(0.01 * 0.25)
    state, _ = load_checkpoint(directory.find("latest", print), build(config).state)

    resume = ["--config", str(file), "--run", str(one), "--resume", str(POINT_MASS)]
    assert main(resume) == 0
    resumed, meta = load_checkpoint(open_run_directory(one)[0].find("latest", print), build(config).state)
    assert meta["num_updates"] == 4
    assert_same(resumed.train, state.train)

    out = tmp_path / "back.pt"
    assert embodichain.main(["to-pt", str(run), "--out", str(out), "--like", str(POINT_MASS)]) == 0
    payload = torch.load(out, weights_only=True)
    assert (payload["schema_version"], payload["global_step"], payload["num_updates"]) == (2, 256, 4)
    assert float(payload["optimizer"]["state"][0]["step"]) == 12.0  # 3 epochs of one minibatch, 4 updates
    assert_same(pt_file.read_pt(out).policy, state_dict_from_params(build(config).policy, state.train.params))

    assert embodichain.main(from_pt) == main(resume) == 2  # never into a run
    assert capsys.readouterr().err.count("holds a run already") == 2


def test_resume_refuses_a_file_that_does_not_fit(
    golden: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(golden, tmp_path)
    for wrong, message in ((tmp_path / "none.pt", "there is no file"), (SEED, "lacks actor.1.weight")):
        assert main(["--config", str(file), "--run", str(tmp_path / "next"), "--resume", str(wrong)]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "next").exists()


@pytest.mark.slow
def test_an_asynchronous_run_goes_on_from_embodichains_file(golden: dict[str, Any], tmp_path: Path) -> None:
    """Its schedule of versions begins with the file's updates, each of which used the newest parameters."""
    raw = options(golden)
    del raw["trainer"]["learning_env"]
    raw["env"] = {"id": "torch:torch_tasks:Wide"}
    raw["trainer"]["collector"] = {"mode": "async"}
    config = parse_config(raw)
    one, two = tmp_path / "one", tmp_path / "two"
    train(config, run_dir=one, resume=str(POINT_MASS))
    embodichain.import_pt(POINT_MASS, config, two)
    assert json.loads((two / "schedule.json").read_text())["versions"] == [0, 1]
    train(config, run_dir=two, resume="latest")
    for run in (one, two):
        assert json.loads((run / "schedule.json").read_text())["versions"][:2] == [0, 1]
        assert open_run_directory(run)[0].find("latest", print).name == "point_mass_step_256"


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_file_again(
    golden: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_config(options(golden))
    whole = train(config, run_dir=tmp_path / "whole", resume=str(POINT_MASS))
    monkeypatch.setattr(RunDirectory, "save", None)
    refused(train, config, run_dir=tmp_path / "run", resume=str(POINT_MASS))
    monkeypatch.undo()
    resumed = train(config, run_dir=tmp_path / "run", resume="latest")
    assert f"starts from {POINT_MASS.absolute()}" in "".join(capsys.readouterr())
    assert_same(resumed.params, whole.params)
    assert resumed.num_updates == 4 and len(resumed.train_history) == 2


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("steps", [1, 2])
def test_a_config_starts_from_embodichains_policy(steps: int, golden: dict[str, Any], tmp_path: Path) -> None:
    """``policy.init_from`` names its file, or a run made of it: here with another optimizer and batch size."""
    file, source = tmp_path / "train.json", POINT_MASS
    if steps == 2:
        file.write_text(json.dumps(options(golden)))
        source = tmp_path / "theirs"
        command = ["from-pt", str(POINT_MASS), "--config", str(file), "--run", str(source), "--policy-only"]
        assert embodichain.main(command) == 0
    raw = options(golden)
    raw["policy"]["init_from"] = str(source)
    raw["algorithm"]["cfg"] |= {"optimizer": {"name": "sgd", "learning_rate": 1e-9}, "batch_size": 16}
    result = train(parse_config(raw), run_dir=tmp_path / "ours")
    assert result.num_updates == 4
    state, _ = load_checkpoint(result.latest_checkpoint_path, build(parse_config(raw)).state)
    theirs = pt_file.read_pt(POINT_MASS).policy
    ours = state_dict_from_params(build(parse_config(raw)).policy, state.train.params)
    for name, x in theirs.items():  # at this rate it has not moved; its normalizers have
        if "normalizer" not in name:
            np.testing.assert_allclose(ours[name], x, atol=1e-6, err_msg=name)


def test_the_policy_alone_starts_a_new_training(config: RunConfig, parts: Parts) -> None:
    state, notes = pt_state.restore(pt_file.read_pt(POINT_MASS), config, parts, policy_only=True)
    assert notes == []
    assert (int(state.update), int(state.train.step)) == (0, 0)
    assert_same(state.train.opt_state, parts.state.train.opt_state)
    assert_same(state_dict_from_params(parts.policy, state.train.params), pt_file.read_pt(POINT_MASS).policy)


def for_sac(golden: dict[str, Any], **network: Any) -> RunConfig:
    """Make a config of SAC, with the actor of the golden training."""
    cfg = {"learning_starts": 0, "replay": {"capacity": 64}}
    raw = options(golden) | {"algorithm": {"name": "sac", "cfg": cfg}}
    del raw["compat"]
    raw["trainer"] |= {"num_envs": 4, "buffer_size": 4}
    wide = {"type": "mlp", "network_cfg": {**raw["policy"]["actor"]["network_cfg"], **network}}
    raw["policy"] = {"name": "actor_q", "actor": wide, "critic": wide, "actor_obs_normalization": True}
    raw["policy"] |= {"init_from": str(POINT_MASS), "squash_actions": True}
    return parse_config(raw)


@pytest.mark.slow
def test_sac_starts_from_the_actor_of_the_file(golden: dict[str, Any], parts: Parts) -> None:
    """Its actions are not squashed: tanh bends them, of the same normal distribution."""
    ours = build(for_sac(golden))
    state, notes = start_from_policy(ours, for_sac(golden))
    adopted = "only its actor, whose actions tanh bends where they come near the bounds: the critics start afresh"
    assert notes == [f"the policy is that of {POINT_MASS}", adopted]
    saved = pt_file.read_pt(POINT_MASS).policy
    obs = jax.random.normal(KEY, (5, saved["actor.0.weight"].shape[1]))
    one = ours.policy.apply(state.train.params, obs)[0]
    other = parts.policy.apply(params_from_state_dict(parts.policy, saved), obs)[0]
    np.testing.assert_allclose(one.base.mean, other.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.base.log_std, other.log_std, rtol=1e-5, atol=1e-6)
    assert_same(state.train.params["params"]["critic"], ours.state.train.params["params"]["critic"])


@cases(
    "network message",
    (
        {"hidden_sizes": [16, 9]},
        r"init_from: .*actor\.3\.weight is float32\[\d+, \d+\], the policy needs float32\[9, 16\]",
    ),
    ({"activation": "relu"}, r"init_from: actor\.2 is Tanh in the file and ReLU by the config"),
)
def test_sac_refuses_the_actor_of_another_network(network: Any, message: str, golden: dict[str, Any]) -> None:
    config = for_sac(golden, **network)
    refused(lambda: start_from_policy(build(config), config), match=message)


def test_sac_refuses_an_actor_of_other_observations(golden: dict[str, Any]) -> None:
    saved, ours = pt_file.read_pt(POINT_MASS), build(for_sac(golden))
    wider = {
        key: np.concatenate([x, x[:, :1]], axis=1) if key == "actor.0.weight" or x.shape[:1] == (1,) else x
        for key, x in saved.policy.items()
        if key.startswith("actor") or key == "log_std"
    }
    with pytest.raises(ValueError, match=r"other observations than the environment's: .*linear_0\.kernel is \(15, "):
        pt_state.restore(replace(saved, policy=wider), for_sac(golden), ours, policy_only=True)


def test_shac_takes_and_gives_the_policy_alone(golden: dict[str, Any]) -> None:
    raw = options(golden) | {"algorithm": {"name": "shac", "cfg": {"segment_length": 4}}}
    del raw["trainer"]["buffer_size"]
    config = parse_config(raw)
    parts = build(config)
    saved = pt_file.read_pt(POINT_MASS)
    state, _ = pt_state.restore(saved, config, parts, policy_only=True)
    chex.assert_trees_all_equal(state.train.target, state.train.params)
    meta = {"global_step": 0, "num_updates": 0, "best_eval_value": None}
    plain = parse_config(raw, [f"policy.{name}_obs_normalization=false" for name in ("actor", "critic")])
    fresh = build(plain)
    assert pt_state.pt_payload(plain, fresh, fresh.state, meta, layout="seed").keys() == {"global_step", "policy"}
    refused(pt_state.pt_payload, config, parts, state, meta, word="EmbodiChain has no shac: layout '0.3' has no place")
    refused(pt_state.restore, saved, config, parts, word="start one: policy.init_from=FILE.pt")


NOTES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"global_step": 150}, {}, ["150 env steps are not a whole number of updates.*continues from 128"]),
    ({}, {"trainer__iterations": 10}, ["'total_iters': 4.*'total_iters': 10"]),
    ({"schedule_step": None, "schedule": None}, {}, [r"the file has no lr_scheduler; the config's, \('linear',"]),
    (
        {},
        {"algorithm__cfg": {"gamma": 0.9, "batch_size": 32}},
        ["cfg.batch_size was 64 there and is 32 here", "cfg.gamma was 0.97 there and is 0.9 here"],
    ),
]
"""Changes of the file, changes of the config, and what is noted then."""


@pytest.mark.parametrize(("of_file", "of_config", "expected"), NOTES)
def test_what_the_file_and_the_config_say_differently_is_told(
    of_file: dict[str, Any], of_config: dict[str, Any], expected: list[str], golden: dict[str, Any]
) -> None:
    if "algorithm__cfg" in of_config:
        cfg = options(golden)["algorithm"]["cfg"]
        of_config = {"algorithm__cfg": {**cfg, **of_config["algorithm__cfg"]}}
    config = parse_config(options(golden, **of_config))
    saved, parts = replace(pt_file.read_pt(POINT_MASS), **of_file), build(config)
    state, notes = pt_state.restore(saved, config, parts)
    assert int(state.update) == 2 and len(notes) == len(expected)
    assert all(re.search(text, note) for text, note in zip(expected, notes, strict=True))
    assert pt_state.restore(saved, config, parts, policy_only=True)[1] == []


def test_devices_and_ranks_count_in_an_update(golden: dict[str, Any]) -> None:
    """128 env steps of 8 x 8 an update are two updates: of one rank, and of four devices with 2 x 8 each."""
    saved = pt_file.read_pt(POINT_MASS)
    cfg = {**options(golden)["algorithm"]["cfg"], "batch_size": 16}
    raw = options(golden, trainer__num_envs=2, trainer__distributed=True, algorithm__cfg=cfg)
    config = parse_config(raw)
    parts = build(config)
    assert (parts.num_devices, rows_per_update(config, parts)) == (4, 64)
    state, notes = pt_state.restore(saved, config, parts)
    assert int(state.update) == 2
    assert notes[0].startswith("algorithm.cfg.batch_size was 64 there")
    assert notes[1].startswith("world_size was 1 there, devices here: 4. trainer.num_envs and algorithm.cfg.batch_size")
    state, notes = pt_state.restore(replace(saved, world_size=4, options={}), config, parts)
    assert (int(state.update), notes) == (2, [])
    config = parse_config(options(golden, trainer__num_envs=16))
    state, notes = pt_state.restore(saved, config, build(config))
    assert (int(state.update), int(state.train.step)) == (1, 2)
    assert len(notes) == 1 and notes[0].endswith("here one has 128, so counting continues from update 1")


@pytest.mark.parametrize("moved", [0.0, 0.5])
def test_ranks_with_normalizers_of_their_own_are_told(
    moved: Any, config: RunConfig, parts: Parts, tmp_path: Path
) -> None:
    payload = torch.load(POINT_MASS, weights_only=True)
    first = payload["normalizer_by_rank"][0]
    payload |= {"world_size": 2, "normalizer_by_rank": [first, {key: x + moved for key, x in first.items()}]}
    torch.save(payload, tmp_path / "a.pt")
    saved = pt_file.read_pt(tmp_path / "a.pt")
    assert saved.world_size == 2
    _, notes = pt_state.restore(saved, config, parts, policy_only=True)
    assert notes == ["the normalizers of the file's 2 ranks differ; taken are those of its policy"] * (moved > 0.0)


@pytest.mark.slow
def test_a_run_on_several_devices_is_written_and_its_folder_is_not_made_from_a_file(
    golden: dict[str, Any], tmp_path: Path
) -> None:
    cfg = {**options(golden)["algorithm"]["cfg"], "batch_size": 16}
    config = parse_config(options(golden, trainer__num_envs=2, trainer__distributed=True, algorithm__cfg=cfg))
    parts = build(config)
    meta = {"global_step": 128, "num_updates": 2, "best_eval_value": None, "config": config.to_dict()}
    create_run_directory(config, tmp_path / "run").save(parts.state, meta, keep=1)
    file = embodichain.export_pt(tmp_path / "run", tmp_path / "a.pt")
    assert_same(pt_file.read_pt(file).policy, state_dict_from_params(parts.policy, parts.state.train.params))
    with pytest.raises(ConfigError, match=r"trainer\.distributed: got true: .*--resume FILE\.pt"):
        embodichain.import_pt(file, config, tmp_path / "b")


def test_grpos_reference_is_kept(golden: dict[str, Any], tmp_path: Path) -> None:
    raw = options(golden)
    raw["policy"] = {"name": "actor_only", "actor": raw["policy"]["actor"]}
    raw["algorithm"] = {"name": "grpo", "cfg": {"kl_coef": 0.1, "batch_size": 64}}
    config = parse_config(raw)
    parts = build(config)
    moved = jax.tree.map(lambda x: x + 0.5, parts.state.train.params)
    state = replace(parts.state, train=replace(parts.state.train, params=moved))
    file = written(tmp_path, config, parts, state, 0)
    back, _ = pt_state.restore(pt_file.read_pt(file), config, parts)
    assert_same(back.train, state.train)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "a.pt", POINT_MASS.read_bytes()
    for damaged in (b"", b"hello", *(content[:size] for size in (100, len(content) // 2, -10))):
        file.write_bytes(damaged)
        refused(pt_file.read_pt, file, word="not a torch file, or is damaged")
    refused(pt_file.read_pt, tmp_path, word="not a torch file, or is damaged")
    refused(pt_file.read_pt, tmp_path / "none.pt", error=FileNotFoundError)


@cases(
    "change message",
    ({"schema_version": 3}, "schema_version 3"),
    ({"schema_version": torch.zeros(2)}, r"schema_version a tensor float32\[2\]"),
    ({"global_step": torch.tensor(128)}, r"'global_step' .*, got a tensor int64\[\]"),
    ({"num_updates": -1}, "'num_updates' .*, got -1"),
    ({"num_updates": 2**70}, "'num_updates' .*, got an integer of 71 bits"),
    ({"world_size": 0}, "'world_size' .*, got 0"),
    ({"normalizer_by_rank": [None]}, "'normalizer_by_rank.0' .*, got None"),
    ({"policy": None}, "'policy' .*, got None"),
    ({"policy": {"log_std": None}}, "'policy.log_std' .*, got None"),
    ({"policy": {"log_std": torch.tensor([torch.nan])}}, "with NaN or infinity"),
    ({"policy": {"log_std": torch.zeros(1).expand(10**14)}}, "that the file holds 4 bytes of"),
    ({"ref_policy": {"log_std": torch.eye(2).to_sparse()}}, "'ref_policy.log_std' .* a sparse_coo tensor"),
    ({"lr_scheduler": {}}, "'lr_scheduler.last_epoch' is missing"),
    ({"lr_scheduler_cfg": "linear"}, "'lr_scheduler_cfg' .*, got 'linear'"),
    ({"optimizer": {"state": {}}}, "'optimizer.param_groups' is missing; it has state"),
    ({"optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, "'optimizer.param_groups.0.params' is missing"),
    ({"metadata": 3}, "'metadata' .*, got 3"),
    ({"metadata": {"policy_attributes": 3}}, "'metadata.policy_attributes' .*, got 3"),
    ({"metadata": {"algorithm_config": 3}}, "'metadata.algorithm_config' .*, got 3"),
    ({"metadata": {"modules": [["actor", 3, ""]]}}, "'metadata.modules.0.1' .*, got 3"),
    ({"metadata": {"policy_attributes": {"action_std_range": ["a", "b"]}}}, "action_std_range' must be two"),
)
def test_content_that_no_version_writes_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    payload = torch.load(POINT_MASS, weights_only=True)
    torch.save({**payload, **change}, tmp_path / "a.pt")
    refused(pt_file.read_pt, tmp_path / "a.pt", match=message)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_widened(dtype: str, tmp_path: Path) -> None:
    policy = torch.load(POINT_MASS, weights_only=True)["policy"]
    policy = {key: x.to(dtype) if x.is_floating_point() else x for key, x in policy.items()}
    torch.save({"global_step": 0, "policy": policy}, tmp_path / "a.pt")
    for key, x in pt_file.read_pt(tmp_path / "a.pt").policy.items():
        np.testing.assert_array_equal(x, policy[key].double().numpy())
        assert x.dtype == (np.int64 if key.endswith("count") else np.float32)


@cases(
    "change message",
    ({"activation": "relu"}, r"actor\.2 is Tanh in the file and ReLU by the config: change policy\.actor"),
    ({"last_activation": "tanh"}, r"actor\.7 is no module in the file and Tanh by the config"),
)
def test_an_activation_that_is_not_the_files_is_refused(change: Callable, message: str, golden: dict) -> None:
    network = {**options(golden)["policy"]["actor"]["network_cfg"], **change}
    config = parse_config(options(golden, policy__actor={"type": "mlp", "network_cfg": network}))
    with pytest.raises(ValueError, match=message):
        pt_state.restore(pt_file.read_pt(POINT_MASS), config, build(config), policy_only=True)


def test_files_and_policies_that_do_not_fit_are_refused(
    golden: dict[str, Any], config: RunConfig, parts: Parts, tmp_path: Path
) -> None:
    file = tmp_path / "a.pt"
    torch.save({"model_state_dict": {}}, file)
    refused(pt_file.read_pt, file, word="'global_step' is missing; it has model_state_dict")
    with pytest.raises(ValueError, match=r"actor\.0\.weight is float32\[16, 5\]|lacks actor\.1\.weight"):
        pt_state.restore(pt_file.read_pt(SEED), config, parts)

    saved = pt_file.read_pt(POINT_MASS)
    narrow = {key: x[:, :9] if x.ndim == 2 and x.shape[1] == 14 else x for key, x in saved.policy.items()}
    with pytest.raises(ValueError, match=r"actor\.0\.weight is \[16, 9\] in the file and \[16, 14\] here"):
        pt_state.restore(replace(saved, policy=narrow), config, parts)
    wide = {**saved.policy, "log_std": np.float32([-7.0, 0.0])}
    clamped = parse_config(options(golden, policy__log_std_range=[-5.0, 2.0]))
    with pytest.raises(ValueError, match=r"set policy\.log_std_range to that"):
        pt_state.restore(replace(saved, policy=wide), clamped, build(clamped))

    meta = {"global_step": 0, "num_updates": 0, "best_eval_value": None}
    refused(pt_state.pt_payload, config, parts, parts.state, meta, layout="head", word="only the ActorCritic of 0.3")
    with pytest.raises(ValueError, match=r"not a checkpoint of EmbodiChain 0\.3"):
        pt_state.pt_payload(config, parts, parts.state, meta, like=SEED)
    squashed = parse_config(options(golden, policy__squash_actions=True))
    refused(pt_state.pt_payload, squashed, build(squashed), parts.state, meta, word="by tanh_normal")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("like", [None, POINT_MASS])
def test_embodichain_itself_goes_on_from_our_file(
    like: Any, golden: dict[str, Any], config: RunConfig, parts: Parts, tmp_path: Path
) -> None:
    """Its 0.3.2: load_state_dict strict, its Trainer's resume, the same actions, the same next update."""
    pytest.importorskip("embodichain.learning.rl.runtime", reason="needs EmbodiChain", exc_type=ImportError)
    state, _ = pt_state.restore(pt_file.read_pt(POINT_MASS), config, parts)
    state = replace(state, train=next_update(parts, config, state, golden)[0], update=jnp.int32(3))  # made by ejax
    file = written(tmp_path, config, parts, state, 3, best=0.5, like=like)

    trainer = runpy.run_path(str(GOLDEN / "make_embodichain_checkpoint.py"))["make_trainer"](str(tmp_path))
    trainer.policy.load_state_dict(torch.load(file, weights_only=True)["policy"], strict=True)
    if like is None:
        with pytest.warns(UserWarning, match="Legacy checkpoint has no configuration metadata"):
            trainer.load_checkpoint(file)
    else:
        trainer.load_checkpoint(file)
    assert (trainer.global_step, trainer.num_updates, trainer.best_eval_value) == (192, 3, 0.5)
    obs = golden["rollout/obs"].reshape(-1, 14)
    from tensordict import TensorDict

    td = TensorDict({"obs": torch.from_numpy(obs)}, batch_size=[len(obs)])
    with torch.no_grad():
        there = trainer.policy.get_action(td, deterministic=True)
    action, _, value = get_action(parts.policy, state.train.params, obs, KEY, deterministic=True)
    np.testing.assert_allclose(action, there["action"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(value, there["value"], rtol=1e-5, atol=2e-6)

    rollout = {name[8:]: torch.from_numpy(x) for name, x in golden.items() if name[:8] == "rollout/"}
    metrics_there = trainer.algorithm.update(TensorDict(rollout, batch_size=rollout["reward"].shape))
    trained, metrics = next_update(parts, config, state, golden)
    for name in ("actor_loss", "value_loss", "entropy", "learning_rate"):
        np.testing.assert_allclose(metrics[name], metrics_there[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for key, x in state_dict_from_params(parts.policy, trained.params).items():
        np.testing.assert_allclose(x, trainer.policy.state_dict()[key], rtol=1e-4, atol=1e-5, err_msg=key)
    trainer.train(256)
    assert trainer.num_updates == 4
