"""Policies of one's own, the same tests for Flax Linen and Flax NNX."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import own_policies
import pretrain_tasks
import pytest
from case_tables import refused
from flax import nnx
from own_policies import HIDDEN, KINDS, OBS, LinenBatchNorm, LinenHeads, NnxPlain
from tiny import STEPS, tiny

import ejax
from ejax.algorithms.bc import BCConfig, bc_update
from ejax.algorithms.ppo import PPOConfig, ppo_loss
from ejax.config import parse_config
from ejax.config.embodichain.check import check
from ejax.data.lerobot.write import EpisodeWriter
from ejax.distributions import Normal
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import make_optimizer
from ejax.play.saved_policy import evaluate_run
from ejax.policies.calls import apply_policy, first_memory
from ejax.policies.heads import uses_dropout
from ejax.policies.nnx import NnxPolicy, NnxPolicyWithMemory
from ejax.policies.nnx import ObsNormalizer as NnxObsNormalizer
from ejax.policies.normalize import ObsNormalizer, update_normalizer
from ejax.rollout import reset, unroll
from ejax.run import train
from ejax.runtime.sharding import make_mesh, sharded
from ejax.schema.trust import trust
from ejax.training.build import build
from ejax.types import make_train_state

KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (6, 4, OBS))
FRAMEWORKS = pytest.mark.parametrize("framework", ["linen", "nnx"])


def config(framework: str, kind: str, output_dir: Path, **trainer: Any) -> dict[str, Any]:
    raw = tiny(output_dir, save_frequency_updates=1, keep_checkpoints=4, **trainer)
    return raw | {"policy": {"name": "own_policies:make", "cfg": {"framework": framework, "kind": kind}}}


def keys_in(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


@pytest.mark.slow
@FRAMEWORKS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the policy has not learned")
def test_a_run_is_resumed_forked_evaluated_loaded_and_taken_on_from(framework: str, kind: str, tmp_path: Path) -> None:
    whole = train(parse_config(config(framework, kind, tmp_path)))
    first = whole.run_dir / "checkpoints" / f"tiny_step_{STEPS}"
    chex.assert_trees_all_equal(
        train(parse_config(config(framework, kind, tmp_path)), resume=str(first)).params, whole.params
    )
    forked = train(parse_config(config(framework, kind, tmp_path)), fork=first, run_dir=tmp_path / "forked")
    chex.assert_trees_all_equal(forked.params, whole.params)
    assert not keys_in(whole.params)
    assert np.isfinite(evaluate_run(whole.run_dir, num_episodes=2, num_envs=2)["eval/avg_reward"])
    acted = [ejax.load(whole.run_dir).act(np.asarray(ROWS[0])) for _ in range(2)]
    np.testing.assert_array_equal(*acted)
    policy = own_policies.make(framework, kind)
    mode = np.asarray(apply_policy(policy, whole.params, ROWS[0], first_memory(policy, 4))[0].mode())
    inside = np.abs(mode) < 1.0  # the action space's bounds
    assert inside.any()
    np.testing.assert_allclose(acted[0][inside], mode[inside], rtol=1e-5, atol=1e-6)  # no unit was dropped
    raw = config(framework, kind, tmp_path, iterations=1)
    raw["policy"]["init_from"] = str(whole.run_dir)
    raw["algorithm"]["cfg"]["optimizer"] = {"learning_rate": 1e-30}
    taken_on = train(parse_config(raw)).params
    chex.assert_trees_all_close(taken_on["params"], whole.params["params"])


@pytest.mark.slow
@FRAMEWORKS
def test_dropout_is_the_rows_own_and_off_without_a_seed(framework: str) -> None:
    policy = own_policies.make(framework, "dropout")
    params, seed = policy.init(KEY, ROWS), jnp.arange(24, dtype=jnp.uint32).reshape(6, 4)

    def mean(rows: Any, **keywords: Any) -> Any:
        return policy.apply(params, rows, **keywords)[0].mode()

    dropped, again = mean(ROWS, dropout_seed=seed), mean(ROWS, dropout_seed=seed)
    np.testing.assert_array_equal(dropped, again)
    np.testing.assert_allclose(mean(ROWS[2:3], dropout_seed=seed[2:3]), dropped[2:3], rtol=1e-5, atol=1e-6)
    assert not np.isclose(mean(ROWS, dropout_seed=seed + 1), dropped).any()
    same = jnp.broadcast_to(ROWS[:1, :1], ROWS.shape)
    assert np.ptp(mean(same, dropout_seed=seed), axis=(0, 1)).min() > 0.1  # a mask for each row
    np.testing.assert_allclose(np.ptp(mean(same), axis=(0, 1)), 0.0, atol=1e-6)
    seeds = jnp.arange(4096, dtype=jnp.uint32)[:, None]
    many = mean(jnp.broadcast_to(ROWS[:1, :1], (4096, 1, OBS)), dropout_seed=seeds).mean(axis=0)
    np.testing.assert_allclose(many, mean(ROWS[:1, :1])[0], atol=0.05)  # what is kept is scaled up


@pytest.mark.slow_cases("nnx")
@FRAMEWORKS
def test_an_update_drops_what_was_dropped_in_acting(framework: str) -> None:
    policy, env = own_policies.make(framework, "dropout"), PointMassRL()
    params = policy.init(KEY, ROWS)
    rollout, _ = unroll(policy, env, params, reset(env, KEY, 4), KEY, num_steps=8, dropout=True)
    batch = {name: getattr(rollout, name) for name in ("obs", "action", "log_prob", "value", "dropout_seed")}
    batch |= {"advantage": rollout.reward, "value_target": rollout.reward}
    batch = {name: x.reshape(32, *x.shape[2:]) for name, x in batch.items()}
    loss = jax.jit(partial(ppo_loss, policy=policy, config=PPOConfig()))
    assert loss(params, batch)[1]["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    del batch["dropout_seed"]
    assert loss(params, batch)[1]["approx_kl"] > 1e-3


@pytest.mark.slow
@FRAMEWORKS
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_drops_where_the_policy_has_dropout(framework: str, kind: str, tmp_path: Path) -> None:
    run = parse_config(config(framework, kind, tmp_path))
    parts = build(run)
    assert uses_dropout(parts.policy) == (kind == "dropout")
    drawn = {var.aval.dtype for eqn in jax.make_jaxpr(parts.stepper.step)(parts.state, KEY).eqns for var in eqn.outvars}  # type: ignore[attr-defined]
    assert (jnp.dtype("uint32") in drawn) == (kind == "dropout")  # of each step's seed


@pytest.mark.slow
@FRAMEWORKS
def test_running_averages_are_those_of_the_rows_that_count(framework: str) -> None:
    policy = own_policies.make(framework, "batch_norm")
    params = policy.init(KEY, ROWS)
    valid = np.ones((6, 4), bool)
    valid[0] = valid[3, 1] = False
    rows = np.array(ROWS)
    rows[1, 2, 0], rows[0, 0, 0] = np.nan, 1e30  # broken, and one that does not count
    counting = rows[valid & np.isfinite(rows).all(axis=-1)]
    hidden = jax.tree.leaves(params["params"], is_leaf=lambda x: isinstance(x, dict) and "kernel" in x)
    layer = next(x for x in hidden if isinstance(x, dict) and x["kernel"].shape == (OBS, HIDDEN))
    seen = counting @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    after = update_normalizer(policy, params, jnp.asarray(rows), jnp.asarray(valid))
    assert after["params"] is params["params"]
    whole = update_normalizer(policy, params, jnp.asarray(np.resize(counting, (2 * 18, 1, OBS))))
    # 24 places are given to 18 rows: the first six of them count twice
    seen = np.concatenate([seen, seen[:6]])
    norm = after["batch_stats"]["norm"]
    np.testing.assert_allclose(norm["mean"], 0.1 * seen.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.9 + 0.1 * seen.var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(whole["batch_stats"]["norm"]["mean"], 0.1 * seen[:18].mean(axis=0), rtol=1e-4, atol=1e-6)
    nothing = update_normalizer(policy, params, jnp.asarray(rows), jnp.zeros_like(valid))
    chex.assert_trees_all_equal(nothing, params)


class LinenLayer(nn.Module):
    """A policy with a layer that keeps or draws something between two others."""

    layer: nn.Module

    @nn.compact
    def __call__(self, obs: jax.Array) -> Any:
        return LinenHeads()(jnp.tanh(self.layer(nn.Dense(HIDDEN)(obs))))


class LinenObserving(LinenLayer):
    def __call__(self, obs: jax.Array, *, observe: Any = False) -> Any:
        del observe
        return super().__call__(obs)


class LinenBatchNormAndMemory(LinenBatchNorm):
    def init_memory(self, num_rows: int) -> jax.Array:
        return jnp.zeros((num_rows, 1))

    def __call__(self, obs: jax.Array, *, memory: Any = None, observe: Any = False) -> Any:
        return *super().__call__(obs, observe=observe), memory


class NnxLayer(NnxPlain):
    def __init__(self, make: Any, ask: Any, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.layer, self.ask = make(rngs), ask

    def __call__(self, obs: jax.Array) -> Any:
        return self.heads(jnp.tanh(self.ask(self.layer, self.hidden(obs))))


class NnxWithMemory(NnxLayer):
    def init_memory(self, num_rows: int) -> jax.Array:
        return jnp.zeros((num_rows, 1))

    def __call__(self, obs: jax.Array, *, memory: Any = None, first: Any = None) -> Any:
        return *super().__call__(obs), memory


class Scaled(nnx.Module):
    """Keeps arrays that are no variables."""

    def __init__(self, wrap: Any = nnx.data) -> None:
        self.scale, self.offset = wrap(jnp.full(HIDDEN, 2.0)), np.zeros(HIDDEN, np.float32)

    def __call__(self, x: jax.Array, grow: bool = False) -> jax.Array:
        if grow:
            self.scale = self.scale + 1.0
        return x * self.scale[None] + self.offset[None]


def add_one(counter: nnx.Variable, x: jax.Array) -> jax.Array:
    counter[...] += 1
    return x


def call(layer: Any, x: jax.Array, **keywords: Any) -> jax.Array:
    return layer(x, **keywords)


def norm(rngs: nnx.Rngs, **keywords: Any) -> nnx.BatchNorm:
    return nnx.BatchNorm(HIDDEN, rngs=rngs, **keywords)


def nnx_layer(make: Any, ask: Any = call, memory: bool = False) -> Any:
    module, kind = (NnxWithMemory, NnxPolicyWithMemory) if memory else (NnxLayer, NnxPolicy)
    return kind(partial(module, make, ask))


DROPOUT = partial(nnx.Dropout, 0.5)
LOSES = {
    "linen_dropout": (lambda: LinenLayer(nn.Dropout(0.5, deterministic=False)), "PRNG for .dropout"),
    "linen_moves_as_it_acts": (lambda: LinenLayer(nn.BatchNorm(use_running_average=False)), "immutable"),
    "linen_moves_when_observed": (lambda: LinenObserving(nn.BatchNorm(use_running_average=False)), "immutable"),
    "linen_never_moves": (lambda: LinenLayer(nn.BatchNorm(use_running_average=True)), "keyword argument 'observe'"),
    "linen_normalizer_never_moves": (lambda: LinenLayer(ObsNormalizer()), "keyword argument 'observe'"),
    "linen_memory": (LinenBatchNormAndMemory, "use LayerNorm"),
    "nnx_dropout": (
        lambda: nnx_layer(lambda rngs: DROPOUT(rngs=rngs), partial(call, deterministic=False)),
        "draws from layer.rngs.count",
    ),
    "nnx_dropout_without_rngs": (lambda: nnx_layer(lambda rngs: DROPOUT()), "drop nothing; pass it rngs"),
    "nnx_dropout_and_memory": (
        lambda: nnx_layer(lambda rngs: DROPOUT(rngs=rngs), memory=True),
        "take dropout_seed for ejax.policies.mlp.consistent_dropout",
    ),
    "nnx_moves_as_it_acts": (
        lambda: nnx_layer(norm, partial(call, use_running_average=False)),
        r"changes layer.mean \(BatchStat\) while it acts",
    ),
    "nnx_never_moves": (lambda: nnx_layer(partial(norm, use_running_average=True)), "never move"),
    "nnx_normalizer_never_moves": (lambda: nnx_layer(lambda rngs: NnxObsNormalizer(HIDDEN)), "never move"),
    "nnx_counts": (
        lambda: nnx_layer(lambda rngs: nnx.Variable(jnp.zeros(())), add_one),
        r"changes layer \(Variable\) while it acts",
    ),
    "nnx_array": (lambda: nnx_layer(lambda rngs: Scaled(), partial(call, grow=True)), "changes layer.scale .* it acts"),
    "nnx_array_unseen": (
        lambda: nnx_layer(lambda rngs: Scaled(lambda x: x)),
        r"NNX does not see \(layer.offset, layer.scale\); wrap them: nnx.data",
    ),
    "nnx_memory": (lambda: nnx_layer(norm, memory=True), "use LayerNorm"),
}


def losing(name: str) -> Any:
    return LOSES[name][0]()


@pytest.mark.parametrize("name", LOSES)
def test_what_would_be_lost_or_repeated_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    raw = tiny(tmp_path) | {"policy": {"name": f"{__name__}:losing", "cfg": {"name": name}}}
    refused(lambda: build(parse_config(raw)), match=LOSES[name][1])


class Answers(nn.Module):
    """Gives what it is made with, of a distribution and a value [N, 1]."""

    form: Any

    @nn.compact
    def __call__(self, obs: jax.Array) -> Any:
        return self.form(Normal(nn.Dense(1)(obs), jnp.zeros(1)), nn.Dense(1)(obs))


def answers(form: str) -> Any:
    return {"class": Answers, "object": None}[form] if FORMS[form][0] is None else Answers(FORMS[form][0])


FORMS = {
    "column": (lambda distribution, value: (distribution, value), r"gives \(Normal, array \[1, 1\]\) of one row"),
    "no_value": (lambda distribution, value: distribution, r"gives \(Normal\)"),
    "turned": (lambda distribution, value: (value[:, 0], distribution), r"gives \(array \[1\], Normal\)"),
    "more": (lambda distribution, value: (distribution, value[:, 0], 1), r"gives \(Normal, array \[1\], int\)"),
    "class": (None, "got the class Answers; must be a module"),
    "object": (None, "got NoneType; must be a module"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_is_no_distribution_and_value_is_refused_by_its_form(form: str, tmp_path: Path) -> None:
    raw = tiny(tmp_path) | {"policy": {"name": f"{__name__}:answers", "cfg": {"form": form}}}
    refused(lambda: build(parse_config(raw)), match=FORMS[form][1])


BUILT_IN = {"network_cfg": {"hidden_sizes": [4], "dropout_p": 0.5}}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apg", "shac"])
@pytest.mark.parametrize("framework", ["linen", "nnx", "built_in"])
def test_an_algorithm_that_drops_nothing_refuses_dropout(algorithm: str, framework: str, tmp_path: Path) -> None:
    raw = config(framework, "dropout", tmp_path) | {"algorithm": {"name": algorithm}}
    if framework == "built_in":
        raw["policy"] = {"name": "actor_critic", "actor": BUILT_IN, "critic": BUILT_IN}
    refused(lambda: build(parse_config(raw)), match="policy with dropout, which this algorithm does not support")


@pytest.mark.slow
@FRAMEWORKS
def test_cloning_drops_and_moves_averages(framework: str) -> None:
    options = BCConfig(batch_size=8, updates_per_step=3)
    optimizer = make_optimizer(options.optimizer)
    batch = {"obs": ROWS, "action": jnp.ones((6, 4, 2))}

    def cloned(kind: str, dropout: bool) -> tuple[Any, Any]:
        policy = own_policies.make(framework, kind)
        params = policy.init(KEY, ROWS)
        state = make_train_state(params, optimizer)
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
        assert len(moments) == 2 * len([x for x in jax.tree.leaves(params["params"]) if x.ndim])  # Adam's, no others
        update = partial(bc_update, policy=policy, optimizer=optimizer, config=options)
        return params, update(state, batch, KEY, dropout=dropout)[0].params

    before, after = cloned("batch_norm", False)
    norm = after["batch_stats"]["norm"]
    assert not np.isclose(norm["mean"], before["batch_stats"]["norm"]["mean"]).any()
    (_, dropped), (_, whole) = cloned("dropout", True), cloned("dropout", False)
    assert any(not np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (dropped, whole)), strict=True))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, task = tmp_path_factory.mktemp("kept") / "reach", pretrain_tasks.Reach()
    with EpisodeWriter(folder, task.spec(), fps=60) as writer:
        for seed in range(4):
            writer.append(task.generate(seed), "reach the goal", seed=seed)
    return str(folder)


@pytest.mark.slow
@FRAMEWORKS
@pytest.mark.parametrize("kind", ["batch_norm", "dropout", "memory"])
def test_a_cloning_run_is_resumed_and_tuned(framework: str, kind: str, recorded: str, tmp_path: Path) -> None:
    raw = config(framework, kind, tmp_path)
    del raw["trainer"]["num_envs"], raw["trainer"]["buffer_size"]
    raw["algorithm"] = {"name": "bc", "cfg": {"batch_size": 8, "updates_per_step": 2}}
    raw["data"] = {"source": "recorded", "folder": recorded, "chunk_size": 2}
    whole = train(parse_config(raw))
    first = whole.run_dir / "checkpoints" / "tiny_step_32"
    chex.assert_trees_all_equal(train(parse_config(raw), resume=str(first)).params, whole.params)
    tuned = config(framework, kind, tmp_path, iterations=1)
    tuned["policy"]["init_from"] = str(whole.run_dir)
    assert np.isfinite(train(parse_config(tuned)).last_train_metrics["train/loss"])


@pytest.mark.slow
@FRAMEWORKS
@pytest.mark.parametrize("kind", ["batch_norm", "memory"])
def test_a_student_is_distilled_from_a_teacher_of_the_other_kind(framework: str, kind: str, tmp_path: Path) -> None:
    taught = train(parse_config(config("nnx" if framework == "linen" else "linen", kind, tmp_path, iterations=1)))
    raw = config(framework, "dropout", tmp_path, iterations=1)
    raw["algorithm"] = {"name": "distill", "cfg": {"teacher": str(taught.run_dir), "batch_size": 16}}
    assert np.isfinite(train(parse_config(raw)).last_train_metrics["train/kl"])


def test_a_check_of_the_config_names_the_formats_of_an_export(tmp_path: Path) -> None:
    (file := tmp_path / "run.json").write_text(json.dumps(config("nnx", "plain", tmp_path)))
    trust("own_policies:make")
    (note,) = [note for note in check(file) if note.key == "policy.name"]
    assert note.status == "used" and "stablehlo; stablehlo alone where torch lacks one of its operations" in note.text


@pytest.mark.slow
@FRAMEWORKS
@pytest.mark.parametrize("kind", ["normalizer", "batch_norm"])
def test_statistics_of_rows_on_several_devices_are_those_of_one(framework: str, kind: str) -> None:
    policy = own_policies.make(framework, kind)
    params = policy.init(KEY, ROWS)
    rows = jax.random.normal(KEY, (640, 4, OBS))  # more than one step of averages
    mesh, update = make_mesh(jax.devices()[:4]), jax.jit(partial(update_normalizer, policy))
    with jax.set_mesh(mesh):
        several = update(params, jax.device_put(rows, sharded(mesh, 1)))
    chex.assert_trees_all_close(several, update(params, rows), rtol=1e-5, atol=1e-6)


def test_both_kinds_of_normalizer_compute_the_same() -> None:
    linen, other = ObsNormalizer(), NnxObsNormalizer(OBS)
    before = linen.init(KEY, ROWS)
    valid = jax.random.bernoulli(KEY, shape=(6, 4))
    y, after = linen.apply(before, ROWS, observe=valid, mutable=["normalizer"])
    np.testing.assert_array_equal(other(ROWS, observe=valid), y)
    assert other.count[...] == valid.sum()
    np.testing.assert_array_equal(other(ROWS), linen.apply(after, ROWS))


def test_arrays_of_a_module_are_carried() -> None:
    policy = nnx_layer(lambda rngs: Scaled())
    params = policy.init(KEY, ROWS)
    obs = ROWS[0]
    mean = policy.apply(params, obs)[0].mode()
    kept, params["carried"]["layer"]["scale"] = params["carried"]["layer"]["scale"], jnp.zeros(HIDDEN)
    assert kept.tolist() == [2.0] * HIDDEN
    assert np.ptp(policy.apply(params, obs)[0].mode(), axis=0).max() == 0.0 < np.ptp(mean, axis=0).min()
