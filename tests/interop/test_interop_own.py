"""Exports of policies of one's own, as programs, and each of JAX's operations in torch."""

import dataclasses
import importlib
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
from case_tables import refused
from exports import HERE, certificate, needs, save_run
from flax import struct
from own_policies import HIDDEN, OBS
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
from interop.artefacts.parity import ConversionError
from interop.checkpoints.exported import read_export
from interop.export import export_policy, main
from interop.exporters.own import EXPORTER, OneMemory
from interop.exporters.record import actor_function, named_weights, observed
from interop.twin.kinds import load_spec, spec_from_json, spec_to_json
from interop.verify import main as verify_main

KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (5, OBS))
needs_stablehlo = needs("stablehlo")


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
def test_a_run_is_exported_verified_and_acts_as_it_did(run: Path) -> None:
    to = run.parent / "exported"
    assert main([str(run), "--to", str(to), "--formats", ",".join(HERE)]) == 0
    assert verify_main([str(to), "--trust"]) == 0
    report = certificate(to)
    assert [*report["artefacts"]] == HERE and "left_out" not in report
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
    refused(read_export, to, build_env(config), word="holds the program of a policy; use its run")
    if "pt" in HERE:
        twin = importlib.import_module("interop.policy").load_policy(to)
        first, second = (twin.act(np.asarray(ROWS)) for _ in range(2))
        expected = apply_policy(policy, params, ROWS, *([jnp.zeros((5, HIDDEN))] if memory else [()]))[0].mode()
        np.testing.assert_allclose(first, np.clip(expected, -1.0, 1.0), atol=1e-5)
        assert (np.abs(first - second).max() > 1e-4) == bool(memory)  # it remembers


def trained(policy: Any, params: Any) -> Trained:
    exported, spec = EXPORTER.describe(policy, observed(PointMassRL()))
    return Trained(actor_function(EXPORTER, exported, params, spec), spec, {}, 0)


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


class Doing(nn.Module):
    """``do(x, w)`` of numbers [B, 12] and weights [12, 12], as an action [B, 2]."""

    do: Any

    @nn.compact
    def __call__(self, obs: jax.Array) -> Any:
        width = obs.shape[-1]
        weight = self.param("weight", nn.initializers.normal(0.5), (width, width))
        with jax.numpy_rank_promotion("allow"):
            made = jnp.asarray(self.do(obs, weight), jnp.float32).reshape(*obs.shape[:-1], -1)
            waves = jnp.sin(made * jnp.arange(1.0, made.shape[-1] + 1.0))
        mean = jnp.stack([made.sum(axis=-1), waves.sum(axis=-1)], axis=-1)
        return Normal(mean, jnp.zeros_like(mean)), mean[..., 0]


def squares(x: jax.Array) -> jax.Array:
    return x.reshape(-1, 2, 2, 3)


LINE = np.array([3, 0, 2])
OPERATIONS: dict[str, Any] = {
    "functions": lambda x, w: (
        jax.nn.gelu(x) + jax.nn.silu(x) + jax.nn.elu(x) + jax.nn.softplus(x) + jax.scipy.special.erf(x)
    ),
    "powers": lambda x, w: x**3 + jnp.abs(x) ** 0.7 + jax.lax.rsqrt(x * x + 1.0) + jnp.exp2(x) + jnp.log1p(x * x),
    "rounding": lambda x, w: jnp.round(3 * x) + jnp.floor(2 * x) + jnp.ceil(x) + jnp.sign(x) + jnp.trunc(5 * x),
    "remainders": lambda x, w: jnp.mod(x, 0.7) + jnp.arctan2(x, w[0]) + jnp.hypot(x, w[1]),
    "whole numbers": lambda x, w: ((9 * x).astype(jnp.int32) // 2 + (9 * x).astype(jnp.int32) % 3) ^ 5,
    "choices": lambda x, w: jnp.where((x > 0) & ~(x > 1) | (x < -1), x, jnp.clip(w[0], -0.1, jnp.inf)),
    "reductions": lambda x, w: (
        x.max(1) + x.min(1) + jnp.prod(x[:, :3], 1) + (x > 1).any(1) + (x > -3).all(1) + x.var(1)
    ),
    "extremes": lambda x, w: jnp.argmax(x, 1) + jnp.argmin(x, 1) + jnp.argmax(x > 0, 1),
    "sums on the way": lambda x, w: jnp.cumsum(x, 1) + jax.lax.cummax(x, 1) + jax.lax.cumsum(x, 1, reverse=True),
    "softmax": lambda x, w: jax.nn.softmax(x @ w) + jax.nn.log_softmax(x) + jax.nn.logsumexp(x, axis=1, keepdims=True),
    "products": lambda x, w: jnp.einsum("bijk,blk,km->bijlm", squares(x), x.reshape(-1, 4, 3), w[:3]),
    "attention": lambda x, w: nn.dot_product_attention(*[(x @ w).reshape(-1, 3, 2, 2)] * 3),
    "norms": lambda x, w: nn.LayerNorm().apply({"params": {"scale": w[0], "bias": w[1]}}, x) + x / jnp.linalg.norm(x),
    "pieces": lambda x, w: jnp.concatenate(
        [x[:, ::2], x[:, 3:1:-1], jnp.pad(x, ((0, 0), (1, 2)), constant_values=2.0)], 1
    ),
    "forms": lambda x, w: jnp.stack([jnp.flip(x, 1), jnp.roll(x, 2, axis=1), jnp.tile(x[:, :4], 3)], 1).transpose(
        0, 2, 1
    ),
    "places": lambda x, w: x[:, LINE] @ w[:3] + w[(9 * jnp.abs(x[:, 0])).astype(int) % 12] + x[:, 20:30].sum(),
    "places of rows": lambda x, w: jnp.take_along_axis(x, (9 * jnp.abs(x)).astype(int) % 12, axis=1),
    "places outside": lambda x, w: jnp.nan_to_num(jnp.take(w, (9 * x[:, :2]).astype(int), axis=0), nan=7.0),
    "a moving window": lambda x, w: jax.lax.dynamic_slice(w, (jnp.int32(20), jnp.int32(1)), (2, 5)).sum() + x,
    "convolution": lambda x, w: nn.Conv(2, (2, 1), strides=(2, 1)).apply(
        {"params": {"kernel": w[:2, :3].reshape(2, 1, 3, 1).repeat(2, 3), "bias": w[0, :2]}}, squares(x)
    ),
    "pooling": lambda x, w: (
        nn.max_pool(squares(x), (2, 1), padding="SAME") + nn.avg_pool(squares(x), (1, 2), (2, 1)).sum()
    ),
    "a loop": lambda x, w: jax.lax.scan(lambda c, y: (0.3 * c @ w + y, c[:, 0]), x, w, reverse=True)[0],
    "columns of a loop": lambda x, w: jax.lax.scan(lambda c, y: (c * 0.5 + y, c), x, w[:3])[1].transpose(1, 0, 2),
    "branches": lambda x, w: jax.lax.cond(w[0, 0] > 0, lambda y: y @ w, lambda y: jax.nn.relu(y), x),
    "rows": lambda x, w: jnp.broadcast_to(w[0], (2 * len(x), 12)).reshape(len(x), -1) + jnp.arange(len(x))[:, None],
}


def twin_of(do: Any) -> tuple[Any, Any, Any]:
    from interop.exporters.program import with_program
    from interop.policy import make_policy

    rows = np.asarray(jax.random.normal(KEY, (5, 12)))
    policy = Doing(do)
    params = policy.init(KEY, rows)
    exported, spec = EXPORTER.describe(policy, {"obs": rows[0]})
    spec = spec_from_json(spec_to_json(with_program(spec, actor_function(EXPORTER, exported, params, spec))))
    return make_policy(spec, named_weights(params)), rows, policy.apply(params, rows)[0].mean


@needs("pt")
@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_runs_jaxs_operations(name: str) -> None:
    twin, rows, expected = twin_of(OPERATIONS[name])
    np.testing.assert_allclose(twin.act(rows), expected, rtol=2e-5, atol=2e-5)


@needs("pt")
@pytest.mark.parametrize(
    ("do", "message"),
    [
        (lambda x, w: jnp.sort(x), "torch has no counterpart of JAX's operation sort"),
        (lambda x, w: x / len(x), "computes differently for another number of rows"),
        (
            lambda x, w: x + jax.random.normal(jax.random.key(0), (12,)),
            "torch has no counterpart of JAX's operation random",
        ),
        (lambda x, w: jax.lax.conv_transpose(x[..., None], w[:2, :1, None], (2,), "SAME"), "torch has no"),
    ],
)
def test_what_torch_cannot_run_is_an_error_that_names_it(do: Any, message: str) -> None:
    refused(twin_of, do, match=message, error=ConversionError)


@needs("pt")
@needs_stablehlo
def test_formats_of_a_policy_that_torch_cannot_run_are_left_out_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "_NUM_STEPS", 4)
    monkeypatch.setattr("interop.export.FORMATS", {name: FORMATS[name] for name in ("pt", "stablehlo")})
    policy, env = Doing(lambda x, w: jnp.sort(x)), PointMassRL()
    params = policy.init(KEY, ROWS)
    origin = {"checkpoint": "none", "global_step": 0, "env": {"id": "PointMassRL", "cfg": {}}}
    with pytest.raises(ConversionError, match="operation sort"):
        export_policy(policy, params, env, tmp_path / "to", ["pt", "stablehlo"], origin=origin)
    assert not list(tmp_path.iterdir())
    report = export_policy(policy, params, env, tmp_path / "to", None, origin=origin)
    assert [*report["artefacts"]] == ["stablehlo"] and "operation sort" in report["left_out"]["pt"]
    assert not (tmp_path / "to" / "loader.zip").exists()
    refused(
        importlib.import_module("interop.policy").make_policy,
        load_spec(tmp_path / "to" / "policy.json"),
        {},
        word="JAX's alone",
    )


@needs("pt")
def test_weights_of_another_policy_are_refused() -> None:
    twin, *_ = twin_of(lambda x, w: x @ w)
    with pytest.raises(RuntimeError, match=r"not of this policy, by name or shape: params\.weight, other"):
        twin.load_state_dict({"other": np.zeros((12, 12))})
    with pytest.raises(ValueError, match="has the operation 'system', which this interop lacks"):
        type(twin)(dataclasses.replace(twin.spec, program={**twin.spec.program, "body": BODY}))
    with pytest.raises(ValueError, match="a program of another form: KeyError"):
        type(twin)(dataclasses.replace(twin.spec, program={"weights": {}, "constants": []}))


BODY = {"inputs": 2, "constants": [], "steps": [["system", [0], {}, 1]], "results": [2]}


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
    refused(EXPORTER.describe, Peaked(), leaves, word="the observation has mode int8[3]; let the environment return")


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
    function = actor_function(EXPORTER, exported, params, spec)
    FORMATS["stablehlo"].write(tmp_path / "made", Trained(function, spec, {}, 0))
    program = jax.export.deserialize(bytearray((tmp_path / "made").read_bytes()))
    assert spec.inputs == ("observation.state", "robot.q.pos")
    mean = program.call(obs["observation.state"], obs["robot"]["q.pos"])[1]
    np.testing.assert_allclose(mean, policy.apply(params, obs)[0].mean, rtol=1e-5, atol=1e-6)
