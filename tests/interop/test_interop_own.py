"""Exports of policies of one's own, which have no twin in torch: StableHLO, and ONNX by jax2onnx."""

import importlib.util
from pathlib import Path
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import own_policies
import pytest
from exports import certificate, needs, save_run
from flax import struct
from own_policies import HIDDEN, OBS
from refusals import refused
from tiny import tiny

from ejax.config import parse_config
from ejax.distributions import Normal
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.play.saved_policy import restore_policy
from ejax.policies.calls import apply_policy
from ejax.schema.trust import trust
from ejax.store.run_dir import open_run_directory
from ejax.training.environments import build_env
from interop.artefacts import cases
from interop.artefacts.formats import FORMATS, Trained
from interop.checkpoints.exported import read_export
from interop.export import export_policy, main
from interop.exporters.own import EXPORTER, OneMemory
from interop.exporters.record import observed
from interop.verify import main as verify_main

KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (5, OBS))
needs_stablehlo = needs("stablehlo")
needs_jax2onnx = pytest.mark.skipif(
    bool(FORMATS["onnx"].missing(to_write=True, twin=False)), reason="needs jax2onnx: pip install -e '.[jax2onnx]'"
)


@pytest.fixture(params=[("linen", "normalizer"), ("nnx", "memory")], ids="_".join)
def run(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run as if after one update, whose export is checked on fewer steps than others."""
    monkeypatch.setattr(cases, "_NUM_CONSECUTIVE", 40)
    monkeypatch.setattr(cases, "_NUM_STEPS", 20)
    framework, kind = request.param
    trust("own_policies:make")
    raw = tiny(tmp_path) | {"policy": {"name": "own_policies:make", "cfg": {"framework": framework, "kind": kind}}}
    config = parse_config(raw)
    return save_run(config, tmp_path / "run")


@pytest.mark.slow
@needs_stablehlo
def test_a_run_is_exported_verified_and_acts_as_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = run.parent / "exported"
    assert main([str(run), "--to", str(to)]) == 0
    assert "ejax export: pt is left out: the policy has no torch twin" in capsys.readouterr().err
    assert verify_main([str(to)]) == 0
    report = certificate(to)
    assert "stablehlo" in report["artefacts"] and {"pt", "safetensors"} <= report["left_out"].keys()
    assert {"contract.json", "episode.json", "observations.npz", "policy.json"} <= report["sha256"].keys()
    directory, config = open_run_directory(run)
    policy, params = restore_policy(config, build_env(config), directory.find("latest", print))
    program = jax.export.deserialize(bytearray((to / "policy.stablehlo").read_bytes()))
    memory = [jnp.full((5, HIDDEN), 0.1)] if hasattr(policy, "init_memory") else []
    action, mean, _, *after = program.call(ROWS, *memory)
    distribution, _, remembered = apply_policy(policy, params, ROWS, *(memory or [()]))
    np.testing.assert_allclose(mean, distribution.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(action, jnp.clip(distribution.mode(), -1.0, 1.0), rtol=1e-5, atol=1e-6)
    for mine, its in zip(after, jax.tree.leaves(remembered), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    refused(read_export, to, build_env(config), word="of your own; give its run")
    if importlib.util.find_spec("torch"):
        from interop import policy as torch_side

        refused(torch_side.load_policy, to, word="no torch twin; interop.onnx_policy")


def trained(policy: Any, params: Any) -> Trained:
    exported, spec = EXPORTER.describe(policy, observed(PointMassRL()))
    return Trained(exported, params, spec, {}, 0, EXPORTER)


@needs_stablehlo
def test_what_only_the_critic_reads_is_not_written(tmp_path: Path) -> None:
    policy = own_policies.make("linen", "plain")
    params = policy.init(KEY, ROWS)
    heads = params["params"]["LinenHeads_0"]
    critic = {**heads, "Dense_1": jax.tree.map(lambda x: x + 1.0, heads["Dense_1"])}
    changed = {"params": {**params["params"], "LinenHeads_0": critic}}
    for name, given in (("a", params), ("b", changed)):
        FORMATS["stablehlo"].write(tmp_path / name, trained(policy, given))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@needs_jax2onnx
@pytest.mark.parametrize("kind", ["dropout", "memory"])
def test_jax2onnx_converts_it(kind: str, tmp_path: Path) -> None:
    policy = own_policies.make("nnx", kind)
    made = trained(policy, policy.init(KEY, ROWS))
    FORMATS["onnx"].write(tmp_path / "policy.onnx", made)
    leaves = [np.asarray(ROWS), *([np.full((5, HIDDEN), 0.1, np.float32)] if kind == "memory" else [])]
    answers = FORMATS["onnx"].load(tmp_path / "policy.onnx", made.spec)(leaves)
    for answer, expected in zip(answers, made.function(*leaves), strict=True):
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


def test_formats_of_a_twin_are_refused_by_name(tmp_path: Path) -> None:
    policy = own_policies.make("nnx", "plain")
    message = r"class NnxPolicy have no torch twin: .*There is no pt of it; give --formats onnx,stablehlo"
    with pytest.raises(ValueError, match=message):
        export_policy(policy, policy.init(KEY, ROWS), PointMassRL(), tmp_path / "to", ["pt", "stablehlo"], origin={})
    assert not list(tmp_path.iterdir())


class Starting(nn.Module):
    """Remembers two arrays, of which one does not begin with zeros."""

    def init_memory(self, num_rows: int) -> Any:
        return {"count": jnp.full((num_rows, 1), 3, jnp.int32), "seen": jnp.zeros((num_rows, 2, 2))}

    @nn.compact
    def __call__(self, obs: jax.Array, *, memory: Any = None) -> Any:
        after = {"count": memory["count"] + 1, "seen": memory["seen"] + obs[:, None, :2]}
        mean = memory["count"] + nn.Dense(2)(obs)
        return Normal(mean, jnp.zeros_like(mean)), obs[:, 0], after


def test_a_memory_is_one_array_that_starts_with_zeros() -> None:
    policy = Starting()
    first = policy.init_memory(5)
    params = policy.init(KEY, ROWS, memory=first)
    one = OneMemory(policy)
    distribution, _, after = policy.apply(params, ROWS, memory=first)
    packed, _, memory = one.apply(params, ROWS, memory=one.init_memory(5))
    np.testing.assert_array_equal(packed.mean, distribution.mean)
    flat = np.concatenate([after["count"], after["seen"].reshape(5, 4)], axis=-1)
    np.testing.assert_array_equal(memory["actor"], flat)
    again = one.apply(params, ROWS, memory=memory)[0]
    np.testing.assert_array_equal(again.mean, policy.apply(params, ROWS, memory=after)[0].mean)


@struct.dataclass
class Peak:
    """A distribution of one's own: its mode, or not even that of numbers for each row."""

    value: jax.Array

    def mode(self) -> jax.Array:
        return self.value


class Peaked(nn.Module):
    rank: int = 2

    @nn.compact
    def __call__(self, obs: jax.Array) -> Any:
        return Peak(nn.Dense(2)(obs) if self.rank == 2 else obs[..., 0]), obs[..., 0]


def test_a_distribution_of_ones_own_gives_its_mode_alone() -> None:
    leaves = observed(PointMassRL())
    spec = EXPORTER.describe(Peaked(), leaves)[1]
    assert (spec.head, spec.sizes, spec.outputs) == ("own", (2,), ("action",))
    with pytest.raises(ValueError, match=r"mode of Peak is float32\[1\] for one row; an export takes actions"):
        EXPORTER.describe(Peaked(rank=1), leaves)


def test_an_observation_that_is_neither_numbers_nor_an_image_is_refused() -> None:
    leaves = {"mode": gymnasium.spaces.MultiBinary(3), **observed(PointMassRL())}
    refused(EXPORTER.describe, Peaked(), leaves, word="the observation has mode int8[3]; let the environment give")


class Named(nn.Module):
    """Reads its observation by keys, as a custom policy may."""

    @nn.compact
    def __call__(self, obs: Any) -> Any:
        mean = nn.Dense(2)(jnp.concatenate([obs["observation.state"], obs["robot"]["q.pos"]], axis=-1))
        return Normal(mean, jnp.zeros_like(mean)), mean[..., 0]


@needs_stablehlo
def test_a_policy_that_reads_keys_with_dots_is_exported_by_their_names(tmp_path: Path) -> None:
    obs = {"robot": {"q.pos": ROWS[:, :2]}, "observation.state": ROWS[:, 2:5]}
    policy = Named()
    params = policy.init(KEY, obs)
    leaves = {name: x[0] for name, x in cases.leaves_of(obs).items()}
    exported, spec = EXPORTER.describe(policy, leaves, cases.paths_of(obs))
    FORMATS["stablehlo"].write(tmp_path / "made", Trained(exported, params, spec, {}, 0, EXPORTER))
    program = jax.export.deserialize(bytearray((tmp_path / "made").read_bytes()))
    assert spec.inputs == ("observation.state", "robot.q.pos")
    mean = program.call(obs["observation.state"], obs["robot"]["q.pos"])[1]
    np.testing.assert_allclose(mean, policy.apply(params, obs)[0].mean, rtol=1e-5, atol=1e-6)
