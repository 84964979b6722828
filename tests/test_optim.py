"""Optimizers, clipping and schedules at their limits; torch's own numbers are in test_goldens.py."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_tables import cases, refused

from ejax.algorithms.options import GradientOptions
from ejax.numerics.weight_average import acting_params
from ejax.optim import (
    OptimizerConfig,
    ScheduleConfig,
    apply_gradient,
    bind_schedule,
    clip_by_global_norm,
    get_learning_rate,
    make_actor_critic_optimizer,
    make_optimizer,
    schedule_note,
    scheduled_learning_rate,
    set_learning_rate,
)
from ejax.types import make_train_state, with_networks

GOLDEN = np.load(Path(__file__).parent / "golden" / "torch_optim.npz")
NAMES = ("weight", "bias")
INITIAL = {name: GOLDEN[f"initial/{name}"] for name in NAMES}
GRADIENT = {name: GOLDEN[f"gradient/{name}"] for name in NAMES}
ONE = {"learning_rate": 1.0, "num_updates": jnp.asarray(0)}


def test_weights_are_averaged_from_the_first_step_on() -> None:
    """By hand; weights that a run starts from, put in place after the optimizer was made, count as the first."""
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=1.0, ema_decay=0.2))
    state = replace(make_train_state({"params": {"w": jnp.zeros(2)}}, optimizer), params={"params": {"w": jnp.ones(2)}})
    assert acting_params(state)["params"]["w"].tolist() == [1.0, 1.0]
    w, average = np.ones(2), np.zeros(2)
    for t in range(5):
        gradient = np.array([1.0, -2.0]) * (t + 1)
        finite = jnp.asarray(True)
        state, _ = apply_gradient(state, {"w": jnp.asarray(gradient)}, optimizer=optimizer, finite=finite, skip=True)
        w, decay = w - gradient, min(0.2, t / (t + 9.0))
        average = decay * average + (1.0 - decay) * w
        np.testing.assert_allclose(state.params["params"]["w"], w)
        np.testing.assert_allclose(acting_params(state)["params"]["w"], average, rtol=1e-6)


def test_of_two_optimizers_only_the_actors_weights_are_averaged() -> None:
    optimizer = make_actor_critic_optimizer(
        OptimizerConfig(name="sgd", learning_rate=1.0, ema_decay=0.2), OptimizerConfig(name="sgd", learning_rate=1.0)
    )
    networks = {"actor": jnp.zeros(2), "critic": jnp.zeros(2)}
    state = make_train_state({"params": networks}, optimizer)
    for name in ("actor", "critic", "actor"):
        share = replace(state, params={"params": {name: state.params["params"][name]}})
        finite = jnp.asarray(True)
        stepped, _ = apply_gradient(share, {name: jnp.ones(2)}, optimizer=optimizer, finite=finite, skip=True)
        state = replace(stepped, params=with_networks(state.params, stepped.params["params"]))
    acting = acting_params(state)["params"]
    np.testing.assert_allclose(acting["actor"], 0.1 * -1.0 + 0.9 * -2.0, rtol=1e-6)  # decay 0, then 1/10
    np.testing.assert_array_equal(acting["critic"], state.params["params"]["critic"])
    with pytest.raises(ValueError, match="critic_optimizer has ema_decay, but only what acts is averaged"):
        make_actor_critic_optimizer(OptimizerConfig(), OptimizerConfig(ema_decay=0.9))


def test_clipping_divides_by_the_norm_and_a_millionth() -> None:
    clipped, norm = clip_by_global_norm({"a": jnp.array([3e-6, 4e-6])}, 1e-6)
    assert norm == pytest.approx(5e-6)
    np.testing.assert_allclose(clipped["a"], np.array([3e-6, 4e-6]) * 1e-6 / (5e-6 + 1e-6), rtol=1e-5)


def test_infinity_switches_clipping_off() -> None:
    clipped, _ = clip_by_global_norm({"a": jnp.array([3.0, 4.0])}, math.inf)
    assert clipped["a"].tolist() == [3.0, 4.0]


def test_no_schedule_keeps_the_rate() -> None:
    assert scheduled_learning_rate(0.02, ScheduleConfig(), jnp.asarray(7)) == pytest.approx(0.02)


def test_linear_falls_to_zero_by_default_as_embodichains_does() -> None:
    config = bind_schedule(ScheduleConfig(name="linear"), 4)
    rates = [float(scheduled_learning_rate(1.0, config, jnp.asarray(k))) for k in range(6)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


@pytest.mark.parametrize(("name", "low"), [("linear", "end_factor"), ("cosine", "eta_min")])
def test_a_rate_stays_at_the_end_of_its_schedule(name: str, low: str) -> None:
    config = bind_schedule(ScheduleConfig(name=name, kwargs={low: 0.125}), 4)
    rates = [float(scheduled_learning_rate(1.0, config, jnp.asarray(k))) for k in range(4, 14)]
    assert rates == [0.125] * 10


@cases(
    "options begun total said",
    ({"name": "linear"}, 4, 9, "4: 5 updates from there to 9 have the rate 0, and learn nothing.*total_iters=9"),
    ({"name": "cosine"}, 6, 9, "3 updates.*T_max=9"),
    ({"name": "linear", "kwargs": {"end_factor": 0.5}}, 4, 9, "have the rate 0.5;"),
    ({"name": "linear", "kwargs": {"total_iters": 3}}, 0, 4, "1 updates.*learn nothing"),
    ({"name": "linear", "kwargs": {"total_iters": 3, "end_factor": 0.5}}, 0, 4, "^$"),  # begun so
    ({"name": "linear"}, 2, 4, "^$"),
    ({"name": "exponential", "kwargs": {"gamma": 0.9}}, 4, 9, "^$"),
    ({}, 4, 9, "^$"),
)
def test_updates_beyond_the_end_of_a_schedule_are_said(options: dict, begun: int, total: int, said: str) -> None:
    cfg = GradientOptions(optimizer={"learning_rate": 1.0}, lr_scheduler=bind_schedule(ScheduleConfig(**options), 4))
    assert re.search(said, schedule_note(cfg, begun, total))


def test_binding_fills_only_an_open_horizon() -> None:
    assert dict(bind_schedule(ScheduleConfig(name="cosine"), 7).kwargs) == {"T_max": 7}
    given = ScheduleConfig(name="linear", kwargs={"total_iters": 3})
    assert bind_schedule(given, 7) == given
    step = ScheduleConfig(name="step", kwargs={"step_size": 2})
    assert bind_schedule(step, 7) == step


def test_the_learning_rate_in_the_state_is_the_one_used() -> None:
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=0.1))
    state = optimizer.init(INITIAL)
    assert get_learning_rate(state) == pytest.approx(0.1)
    state = set_learning_rate(state, jnp.asarray(0.5))
    updates, state = optimizer.update({name: g[0] for name, g in GRADIENT.items()}, state, INITIAL)
    assert get_learning_rate(state) == pytest.approx(0.5)
    np.testing.assert_allclose(updates["bias"], -0.5 * GRADIENT["bias"][0], rtol=1e-6)


def test_a_foreign_optimizer_has_no_learning_rate_to_read_or_set() -> None:
    state = optax.sgd(0.1).init(INITIAL)
    assert jnp.isnan(get_learning_rate(state))
    refused(set_learning_rate, state, jnp.asarray(0.5), error=KeyError)


def test_equal_configs_have_one_optimizer_and_so_one_compiled_program() -> None:
    kwargs = {"eps": 1e-5, "betas": [0.8, 0.99]}
    first, again, other = (OptimizerConfig(learning_rate=rate, kwargs=kwargs) for rate in (0.1, 0.1, 0.2))
    assert make_optimizer(first) is make_optimizer(again) is not make_optimizer(other)
    assert make_actor_critic_optimizer(first, other) is make_actor_critic_optimizer(again, other)
    array = first.model_copy(update={"learning_rate": jnp.float32(0.1)})  # as that of a population's member is
    assert make_optimizer(array) is not make_optimizer(array)


def test_the_critic_is_stepped_apart_from_the_rest() -> None:
    params = {"actor": jnp.ones(2), "log_std": jnp.zeros(1), "critic": jnp.full(3, 2.0)}
    grads = jax.tree.map(lambda x: x + 1.0, params)
    of_actor = OptimizerConfig(name="adamw", learning_rate=0.1)  # its weight decay needs the parameters
    of_critic = OptimizerConfig(name="sgd", learning_rate=0.01)
    both = make_actor_critic_optimizer(of_actor, of_critic)
    alone, rest = make_optimizer(of_actor), {name: params[name] for name in ("actor", "log_std")}
    expected, expected_state = alone.update({name: grads[name] for name in rest}, alone.init(rest), rest)

    state = both.init(params)
    updates, after = both.update({name: grads[name] for name in rest}, state, rest)
    chex.assert_trees_all_equal((updates, after["actor"]), (expected, expected_state))
    assert after["critic"] is state["critic"]

    updates, last = both.update({"critic": grads["critic"]}, after, {"critic": params["critic"]})
    assert updates.keys() == {"critic"}
    np.testing.assert_allclose(updates["critic"], np.full(3, -0.03), rtol=1e-6)
    assert last["actor"] is after["actor"]


@cases(
    "call given text",
    (OptimizerConfig, {"name": "lion"}, "adam"),
    (OptimizerConfig, {"kwargs": {"lr": 0.1}}, "optimizer.learning_rate"),
    (OptimizerConfig, {"kwargs": {"momentum": 0.9}}, "momentum"),
    (OptimizerConfig, {"name": "sgd", "kwargs": {"momentum": "much"}}, "momentum"),
    (OptimizerConfig, {"name": "sgd", "kwargs": {"momentum": 0.9, "nesterov": True, "dampening": 0.1}}, "dampening 0"),
    (OptimizerConfig, {"learning_rate": -1.0}, "learning_rate"),
    (ScheduleConfig, {"name": "warmup"}, "linear"),
    (ScheduleConfig, {"name": "step"}, "step_size"),
    (ScheduleConfig, {"name": "exponential", "kwargs": {"gamma": 0.9, "tau": 1}}, "tau"),
    (ScheduleConfig, {"kwargs": {"gamma": 0.9}}, "without a name"),
    (bind_schedule, {"config": ScheduleConfig(name="linear"), "total_updates": 0}, "got 0"),
    (scheduled_learning_rate, {**ONE, "schedule": ScheduleConfig(name="linear")}, "bind_schedule"),
)
def test_what_is_no_optimizer_or_schedule_is_refused(call: Any, given: dict[str, Any], text: str) -> None:
    refused(call, **given, match=text)
