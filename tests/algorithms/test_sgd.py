"""Minibatch epochs: every row once, the right weights, and what happens when a minibatch goes wrong."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_tables import cases

from ejax.algorithms import sgd
from ejax.algorithms.sgd import MinibatchConfig, sgd_epochs
from ejax.numerics.kernels import FlatParams
from ejax.optim import OptimizerConfig, get_learning_rate, make_optimizer, scale_by_learning_rate
from ejax.types import Params, TrainState, make_train_state

SGD = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.1))
KEY = jax.random.key(0)


def test_padding_does_not_enter_the_permutation() -> None:
    # sent through it, an index outside may never come back inside: the update hung
    update = jax.jit(partial(sgd_epochs, loss=linear_loss, optimizer=SGD, minibatches=minibatches(batch_size=6)))
    for seed in range(20):
        state, _ = update(state_of(7), {"x": jnp.eye(7)}, jax.random.key(seed))
        assert sorted(np.round(10 * np.asarray(state.params["params"]["w"]), 4)) == pytest.approx(
            [1 / 6] * 6 + [1.0], abs=1e-3
        )


def linear_loss(params: Params, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Gradient of w: −Σ weight·x. Rows leave their trace in the parameters."""
    total = jnp.sum(batch["weight"] * (batch["x"] @ params["params"]["w"]))
    return -total, {"x": jnp.sum(batch["weight"] * batch["x"][:, 0])}


def state_of(size: Any, optimizer: optax.GradientTransformation = SGD) -> TrainState:
    params = {"params": {"w": jnp.zeros(size)}}
    return make_train_state(params, optimizer)


def minibatches(**options: Any) -> MinibatchConfig:
    return MinibatchConfig(**{"n_epochs": 1, "batch_size": 4, "max_grad_norm": float("inf"), **options})


def run(
    batch: dict[str, Any],
    *,
    key: jax.Array = KEY,
    loss: Any = linear_loss,
    optimizer: optax.GradientTransformation = SGD,
    **options: Any,
) -> Any:
    hooks = {name: options.pop(name) for name in ("prepare", "adapt_rate", "stop") if name in options}
    update = jax.jit(partial(sgd_epochs, loss=loss, optimizer=optimizer, minibatches=minibatches(**options), **hooks))
    return update(state_of(batch["x"].shape[1], optimizer), batch, key)


def test_every_row_is_used_once_in_every_epoch() -> None:
    # row i alone moves w[i]: by 0.1 over the size of its minibatch
    state, _ = run({"x": jnp.eye(12)}, n_epochs=3)
    np.testing.assert_allclose(state.params["params"]["w"], np.full(12, 3 * 0.1 / 4), rtol=1e-5)


def test_every_row_is_used_once_in_double_precision() -> None:
    with jax.enable_x64(True):
        state, _ = run({"x": jnp.eye(6)})
        assert state.params["params"]["w"].dtype == jnp.float64
        assert sorted(10 * np.asarray(state.params["params"]["w"])) == pytest.approx([1 / 4] * 4 + [1 / 2] * 2)


def test_the_rows_of_the_smaller_last_minibatch_weigh_as_much_as_its_size_says() -> None:
    state, metrics = run({"x": jnp.eye(10)}, n_epochs=2)
    moved = np.asarray(state.params["params"]["w"]) / 0.1
    # in each epoch eight rows are in minibatches of four, two in one of two
    allowed = {4: 1 / 4 + 1 / 4, 6: 1 / 4 + 1 / 2, 8: 1 / 2 + 1 / 2}
    assert all(min(abs(x - a) for a in allowed.values()) < 1e-5 for x in moved)
    assert moved.sum() == pytest.approx(2 * 3)  # each of three minibatches gives its rows 1 in all
    assert metrics["x"] == pytest.approx(1 / 10)  # the mean over rows, not over minibatches


def test_epochs_and_keys_have_orders_of_their_own() -> None:
    def order(key: jax.Array) -> Any:
        # 1/size weights, halved at every minibatch: the sum shows in which minibatch a row was
        return run({"x": jnp.eye(8)}, key=key, batch_size=2, adapt_rate=lambda rate, _: rate / 2)[0].params["params"][
            "w"
        ]

    seen = {tuple(np.asarray(order(jax.random.key(k))).tolist()) for k in range(4)}
    assert len(seen) == 4


def test_a_batch_smaller_than_the_minibatch_is_one_minibatch() -> None:
    state, _ = run({"x": jnp.eye(3)}, batch_size=64)
    np.testing.assert_allclose(state.params["params"]["w"], np.full(3, 0.1 / 3), rtol=1e-6)


def squared_loss(params: Params, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    error = batch["x"] @ params["params"]["w"] - batch["y"]
    return jnp.sum(batch["weight"] * jnp.square(error)), {"error": jnp.sum(batch["weight"] * error)}


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three numbers wide, four rows fill the cache."""
    monkeypatch.setattr(sgd, "_CACHED_ELEMENTS", 12)


def test_accumulated_chunks_give_the_gradient_of_the_whole_minibatch(request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(rng.normal(size=(24, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=24), jnp.float32),
    }
    whole, whole_metrics = run(batch, loss=squared_loss, batch_size=16, n_epochs=2)
    request.getfixturevalue("chunks_of_four")
    parts, parts_metrics = run(batch, loss=squared_loss, batch_size=16, n_epochs=2)
    np.testing.assert_allclose(parts.params["params"]["w"], whole.params["params"]["w"], rtol=1e-5)
    for name, value in whole_metrics.items():
        np.testing.assert_allclose(parts_metrics[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("counting", [0, 5, 12])
def test_rows_that_do_not_count_change_nothing_and_chunks_without_others_are_skipped(
    counting: int, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(0)
    mask = rng.permutation(np.arange(24) < counting).astype(np.float32)
    x = rng.normal(size=(24, 3)).astype(np.float32)
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(x[:, 0]), "mask": jnp.asarray(mask)}
    arguments = {"loss": squared_loss, "batch_size": 24, "n_epochs": 2}
    whole, _ = run(batch, **arguments)
    request.getfixturevalue("chunks_of_four")
    parts, _ = run(batch, **arguments)
    np.testing.assert_allclose(parts.params["params"]["w"], whole.params["params"]["w"], rtol=1e-5)

    def loss_of_chunk(params: Params, chunk: Any) -> Any:
        jax.debug.callback(lambda weight: chunks.append(weight), chunk["weight"])
        return squared_loss(params, chunk)

    chunks: list[np.ndarray] = []
    run(batch, **(arguments | {"loss": loss_of_chunk}))
    jax.effects_barrier()
    assert len(chunks) == 2 * -(-counting // 4)
    assert np.concatenate([*chunks, []]).astype(bool).sum() == 2 * counting


def test_the_gradient_is_clipped_and_its_norm_reported_before() -> None:
    state, metrics = run({"x": jnp.full((4, 1), 5.0)}, max_grad_norm=2.0)
    assert state.params["params"]["w"] == pytest.approx(0.1 * 2.0)
    assert metrics["grad_norm"] == pytest.approx(5.0)


def two_networks_loss(params: Params, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    p = params["params"]
    return jnp.sum(batch["weight"] * batch["x"][:, 0]) * (3.0 * p["actor"] + 4.0 * p["critic"]), {}


@pytest.mark.slow
def test_networks_can_be_clipped_apart() -> None:
    params = {"params": {"actor": jnp.zeros(()), "critic": jnp.zeros(())}}
    state = make_train_state(params, SGD)
    moved = {}
    for apart in (False, True):
        this = minibatches(max_grad_norm=1.0, clip_per_network=apart)
        after, metrics = sgd_epochs(
            state, {"x": jnp.ones((4, 1))}, KEY, loss=two_networks_loss, optimizer=SGD, minibatches=this
        )
        moved[apart] = [-10.0 * float(after.params["params"][name]) for name in ("actor", "critic")]
        assert metrics["grad_norm"] == pytest.approx(5.0)
    assert moved[False] == pytest.approx([0.6, 0.8], rel=1e-5)
    assert moved[True] == pytest.approx([1.0, 1.0], rel=1e-5)


def test_a_minibatch_that_is_not_finite_leaves_everything_as_it_was_and_is_counted() -> None:
    momentum = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.1, kwargs={"momentum": 0.9}))
    batch = {"x": jnp.full((4, 2), jnp.nan)}
    state, metrics = run(batch, optimizer=momentum)
    chex.assert_trees_all_equal(state, state_of(2, momentum))
    assert metrics["skipped_minibatches"] == 1.0
    assert jnp.isnan(metrics["x"])


def test_only_the_bad_minibatch_is_skipped_and_its_metrics_do_not_hide_the_others() -> None:
    x = jnp.ones((8, 1)).at[3].set(jnp.inf)
    state, metrics = run({"x": x}, n_epochs=2)
    assert state.params["params"]["w"] == pytest.approx(2 * 0.1)  # one good minibatch in each epoch
    assert metrics["skipped_minibatches"] == 2.0
    assert metrics["x"] == pytest.approx(1.0)


def test_skipping_can_be_switched_off() -> None:
    state, metrics = run({"x": jnp.full((4, 1), jnp.nan)}, skip_nonfinite=False)
    assert jnp.isnan(state.params["params"]["w"]).all()
    assert metrics["skipped_minibatches"] == 1.0


# its parameters stay finite; what steps are made from does not
MOMENT_OVERFLOWS = optax.GradientTransformation(
    lambda params: jnp.float32(3e38), lambda grads, moment, params=None: (grads, 1.5 * moment)
)


@cases(
    "optimizer",
    # a bias correction of 1 - 1^t: 0/0
    optax.chain(optax.scale_by_adam(1.0, 1.0), scale_by_learning_rate(0.1)),
    make_optimizer(OptimizerConfig(name="sgd", learning_rate=3e38, kwargs={"maximize": True})),
    MOMENT_OVERFLOWS,
    ids=["bias correction", "step", "moments"],
)
@pytest.mark.parametrize("skips", [True, False])
def test_a_step_that_is_not_finite_is_not_taken_though_its_gradient_was(
    optimizer: optax.GradientTransformation | optax.GradientTransformationExtraArgs, skips: bool
) -> None:
    batch = {"x": jnp.full((4, 2), 5.0)}
    before = state_of(2, optimizer)
    state, metrics = run(batch, optimizer=optimizer, skip_nonfinite=skips, n_epochs=3)
    assert metrics["skipped_minibatches"] == 3.0 and metrics["skipped_fraction"] == 1.0
    if skips:
        chex.assert_trees_all_equal(state, before)
        assert metrics["grad_norm"] == pytest.approx(5.0 * np.sqrt(2.0))  # that was sound
    else:
        assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_a_later_step_trains_where_one_in_between_was_skipped() -> None:
    adam = make_optimizer(OptimizerConfig(name="adam", learning_rate=0.1))
    x = jnp.ones((12, 1)).at[5].set(jnp.nan)
    skipping, metrics = run({"x": x}, optimizer=adam)
    assert metrics["skipped_fraction"] == pytest.approx(1 / 3)
    sound, _ = run({"x": jnp.ones((8, 1))}, optimizer=adam)  # the two others
    chex.assert_trees_all_equal(skipping, sound)


def test_a_training_that_does_not_skip_is_shown_what_was_not_finite() -> None:
    x = jnp.ones((8, 1)).at[3].set(jnp.inf)
    _, metrics = run({"x": x}, skip_nonfinite=False)
    assert not np.isfinite(metrics["loss"]) and not np.isfinite(metrics["grad_norm"])


def test_once_stopped_no_later_minibatch_trains() -> None:
    # the minibatch mean of x is 1; w grows by 0.1 with each step, and is looked at before the step
    def loss(params: Params, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        value, _ = linear_loss(params, batch)
        return value, {"w": params["params"]["w"][0]}

    state, metrics = run({"x": jnp.ones((8, 1))}, loss=loss, n_epochs=5, stop=lambda m: m["w"] > 0.25)
    assert state.params["params"]["w"] == pytest.approx(0.3)
    assert metrics["stopped_early"] == 1.0 and metrics["skipped_fraction"] == 0.0
    assert metrics["w"] == pytest.approx(np.mean([0.0, 0.1, 0.2, 0.3]))  # of those that were looked at


def test_without_a_stop_every_minibatch_trains() -> None:
    state, metrics = run({"x": jnp.ones((8, 1))}, n_epochs=5, stop=lambda m: m["x"] > 2.0)
    assert state.params["params"]["w"] == pytest.approx(1.0)
    assert metrics["stopped_early"] == 0.0


def test_an_adapted_rate_is_used_in_the_very_step_and_kept() -> None:
    state, _ = run({"x": jnp.ones((8, 1))}, adapt_rate=lambda rate, metrics: rate / (1.0 + metrics["x"]))
    assert get_learning_rate(state.opt_state) == pytest.approx(0.1 / 4)
    assert state.params["params"]["w"] == pytest.approx(0.1 / 2 + 0.1 / 4)


def test_prepare_sees_whole_minibatches_with_their_weights() -> None:
    def centered(minibatch: Any) -> dict[str, Any]:
        mean = jnp.sum(minibatch["x"] * minibatch["weight"][:, None], axis=0, keepdims=True)
        return {**minibatch, "x": minibatch["x"] - mean}

    state, metrics = run({"x": jnp.arange(6.0)[:, None]}, prepare=centered)
    assert state.params["params"]["w"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["x"] == pytest.approx(0.0, abs=1e-6)


def test_only_the_trained_collection_gets_a_gradient() -> None:
    params = {"params": {"w": jnp.zeros(1)}, "normalizer": {"mean": jnp.ones(1)}}
    state = make_train_state(params, SGD)
    after, _ = sgd_epochs(
        state, {"x": jnp.ones((4, 1))}, KEY, loss=linear_loss, optimizer=SGD, minibatches=minibatches()
    )
    assert after.params["normalizer"]["mean"].tolist() == [1.0]
    assert after.params["params"]["w"] == pytest.approx(0.1)


def test_arrays_of_different_lengths_are_refused() -> None:
    batch = {"x": jnp.zeros((8, 1)), "y": jnp.zeros(5)}
    with pytest.raises(ValueError, match=r"same number of rows, got .*8.*5"):
        sgd_epochs(None, batch, jax.random.key(0), loss=None, optimizer=None, minibatches=None)


def critic_loss(params: Params, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    networks = params["params"]
    error = batch["x"] @ networks["actor"]["w"] + networks["actor"]["b"] - jnp.tanh(batch["x"] @ networks["critic"])
    return jnp.sum(batch["weight"] * jnp.square(error - 1.0)), {}


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("clip_per_network", [False, True])
def test_parameters_in_one_vector_learn_what_separate_ones_do(
    monkeypatch: pytest.MonkeyPatch, clip_per_network: bool
) -> None:
    adam = make_optimizer(OptimizerConfig(learning_rate=0.1))
    params = {"params": {"actor": {"w": jnp.zeros(3), "b": jnp.zeros(())}, "critic": 0.1 * jnp.ones(3)}}
    batch = {"x": jnp.sin(jnp.arange(36.0)).reshape(12, 3)}
    options = minibatches(n_epochs=3, max_grad_norm=0.1, clip_per_network=clip_per_network)
    results, packed = [], []
    pack = FlatParams.pack_state
    monkeypatch.setattr(FlatParams, "pack_state", lambda self, state: packed.append(state) or pack(self, state))
    for optimizer in (
        adam,
        optax.GradientTransformation(*adam),
    ):  # of the latter it is not known that it is elementwise
        update = partial(sgd_epochs, loss=critic_loss, optimizer=optimizer, minibatches=options)
        results.append(jax.jit(update)(make_train_state(params, optimizer), batch, KEY))
    assert len(packed) == 1  # the first, and not the second
    (state, metrics), (other, other_metrics) = results
    assert jax.tree.structure(state) == jax.tree.structure(other)
    chex.assert_trees_all_close(state, other, rtol=1e-5, atol=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(other_metrics["grad_norm"]), rel=1e-5)


@pytest.mark.slow
def test_every_minibatch_has_equally_many_rows_of_each_stratum() -> None:
    stratum = jnp.repeat(jnp.eye(4), 6, axis=0)  # 24 rows, six of each of four strata
    state, _ = run({"x": stratum}, batch_size=8, num_strata=4, n_epochs=1)
    np.testing.assert_allclose(state.params["params"]["w"], np.full(4, 3 * 0.1 / 4), rtol=1e-5)
    seen: list[Any] = []

    def looking(params: Params, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        jax.debug.callback(lambda x: seen.append(x.sum(axis=0).tolist()), batch["x"])
        return linear_loss(params, batch)

    run({"x": stratum}, loss=looking, batch_size=8, num_strata=4)
    jax.effects_barrier()
    assert seen == [[2.0] * 4] * 3


def test_strata_that_do_not_divide_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"10 rows in minibatches of 4 cannot be drawn equally from 4 strata"):
        run({"x": jnp.eye(10)}, num_strata=4)
