"""Parameters and Adam's state in torch's layout: exact there and back; torch computes the same from them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from case_tables import cases, refused

from ejax.config import RunConfig
from ejax.distributions import ActionSpec
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import MLP, ActorCritic, ActorOnly, NetworkConfig
from ejax.types import Params, Policy
from interop.checkpoints.optimizer_state import opt_state_from_torch, torch_optimizer_state
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params

OBS, A = 5, 2
SPEC = ActionSpec("normal", (A,))
KEY = jax.random.key(0)
VARIANTS = [{"use_layernorm": layernorm, "dropout_p": dropout} for layernorm in (False, True) for dropout in (0.0, 0.3)]


def network(**options: Any) -> NetworkConfig:
    return NetworkConfig(hidden_sizes=(8, 6), activation="tanh", **options)


def policy_with(**options: Any) -> ActorCritic:
    return ActorCritic(SPEC, network(), NetworkConfig(hidden_sizes=(4,)), **options)


def init(policy: Policy) -> Any:
    """Parameters without a zero or a one that an exchange could hide behind."""
    params = jax.eval_shape(policy.init, KEY, jnp.zeros((1, OBS)))
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(structure, [jnp.asarray(rng.uniform(1, 9, x.shape).round(2), x.dtype) for x in leaves])


def assert_same(a: Any, b: Any) -> None:
    chex.assert_trees_all_equal(a, b, strict=True)


def shapes(state_dict: Mapping[str, Any]) -> list[Any]:
    return [(key, x.shape) for key, x in state_dict.items()]


def test_keys_shapes_and_order_are_embodichains() -> None:
    policy = ActorCritic(SPEC, network(), network())
    layers = [
        (f"{network}.{2 * i}.{name}", shape)
        for network, outputs in (("actor", A), ("critic", 1))
        for i, (size_in, size_out) in enumerate(((OBS, 8), (8, 6), (6, outputs)))
        for name, shape in (("weight", (size_out, size_in)), ("bias", (size_out,)))
    ]
    assert shapes(state_dict_from_params(policy, init(policy))) == [("log_std", (A,)), *layers]


@pytest.mark.parametrize(
    ("variant", "modules"), list(zip(VARIANTS, ([0, 2, 4], [0, 3, 6], [0, 1, 3, 4, 6], [0, 1, 4, 5, 8]), strict=True))
)
def test_modules_count_as_in_an_nn_sequential(variant: dict[str, Any], modules: list[int]) -> None:
    policy = ActorOnly(SPEC, network(**variant))
    keys = list(state_dict_from_params(policy, init(policy)))
    assert keys == ["log_std", *(f"actor.{i}.{name}" for i in modules for name in ("weight", "bias"))]


def test_normalizers_follow_the_networks() -> None:
    policy = policy_with(actor_obs_normalization=True, critic_obs_normalization=True)
    params = init(policy)
    params["normalizer"]["actor_obs_normalizer"]["count"] = jnp.float32(4096.0)
    state_dict = state_dict_from_params(policy, params)
    names = ("mean", "variance", "standard_deviation", "count")
    assert list(state_dict)[-8:] == [f"{net}_obs_normalizer.{name}" for net in ("actor", "critic") for name in names]
    assert state_dict["actor_obs_normalizer.mean"].shape == (1, OBS)
    assert state_dict["actor_obs_normalizer.count"] == np.int64(4096)
    assert state_dict["actor_obs_normalizer.count"].dtype == np.int64
    variance = params["normalizer"]["critic_obs_normalizer"]["variance"]
    np.testing.assert_array_equal(state_dict["critic_obs_normalizer.standard_deviation"], np.sqrt(variance)[None])


@cases(
    "policy",
    *(ActorCritic(SPEC, network(**variant), network(**variant)) for variant in VARIANTS),
    ActorCritic(SPEC, network(), network(), critic_obs_groups=("state",)),
    ActorOnly(SPEC, NetworkConfig(hidden_sizes=())),
    ActorOnly(ActionSpec("multi_categorical", (3, 2)), network()),
    ActorCritic(ActionSpec("tanh_normal", (1,), (-1.0,), (1.0,)), network(), network()),
    policy_with(actor_obs_normalization=True),
)
def test_parameters_come_back_as_they_were(policy: ActorCritic | ActorOnly) -> None:
    obs = {"state": jnp.zeros((1, OBS)), "task": jnp.zeros((1, 3))}
    params = policy.init(KEY, obs)
    assert_same(params_from_state_dict(policy, state_dict_from_params(policy, params)), params)


def test_arrays_are_copies() -> None:
    policy = policy_with()
    params = init(policy)
    before = jax.tree.map(np.array, params)
    state_dict = state_dict_from_params(policy, params)
    back = params_from_state_dict(policy, state_dict)
    for x in state_dict.values():
        x.fill(0)
    assert_same(params, before)
    assert_same(back, before)


def broken(**changes: Any) -> dict[str, Any]:
    policy = policy_with()
    state_dict = state_dict_from_params(policy, init(policy)) | changes
    return {key: x for key, x in state_dict.items() if x is not None}


@cases(
    "state_dict message",
    (broken(**{"critic.2.bias": None}), "lacks critic.2.bias"),
    (broken(**{"critic.9.bias": np.zeros(1)}), "has critic.9.bias, which the policy lacks"),
    (
        {key.replace("log_std", "logstd"): x for key, x in broken().items()},
        "lacks log_std. Did you mean 'logstd'?; has logstd, which the policy lacks. Did you mean 'log_std'?",
    ),
    (broken(log_std=np.zeros(3, np.float32)), "log_std is float32[3], the policy needs float32[2]"),
    (broken(log_std=np.zeros(2)), "log_std is float64[2], the policy needs float32[2]"),
    (broken(**{"actor.0.weight": np.zeros((8, 5, 1), np.float32)}), "the policy needs float32[8, any]"),
)
def test_what_does_not_fit_is_named(state_dict: dict[str, np.ndarray], message: str) -> None:
    refused(lambda: params_from_state_dict(policy_with(), state_dict), match=re.escape(message))


def test_a_policy_without_counterpart_is_refused() -> None:
    refused(state_dict_from_params, MLP(network(), 2), {}, word="MLP has no counterpart")


OPTIMIZERS = [
    OptimizerConfig(learning_rate=0.01),
    OptimizerConfig(kwargs={"betas": [0.8, 0.9], "eps": 1e-5, "weight_decay": 0.1, "maximize": True}),
    OptimizerConfig(name="adamw", kwargs={"weight_decay": 0.02}),
]


def trained_opt_state(config: RunConfig, params: Params, steps: int = 2) -> Any:
    optimizer = make_optimizer(config)
    state = optimizer.init(params["params"])
    for i in range(steps):
        grads = jax.tree.map(lambda x, i=i: jnp.sin(x + i), params["params"])
        _, state = optimizer.update(grads, state, params["params"])
    return state


@pytest.mark.slow_cases("2-config0")
@pytest.mark.parametrize("config", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_the_optimizers_state_comes_back_as_it_was(config: OptimizerConfig, steps: int) -> None:
    policy = policy_with()
    params = init(policy)
    opt_state = trained_opt_state(config, params, steps)
    opt_state = optax.tree_utils.tree_set(opt_state, learning_rate=jnp.float32(0.003))
    there = torch_optimizer_state(policy, opt_state, config)
    assert len(there["state"]) == (0 if steps == 0 else len(state_dict_from_params(policy, params)))
    assert_same(opt_state_from_torch(policy, params, there, config), opt_state)


@cases(
    "change message",
    (lambda s: s["param_groups"][0].update(betas=(0.9, 0.95)), r"betas is \(0.9, 0.95\) in it, \(0.9, 0.999\) in"),
    (lambda s: s["param_groups"][0].update(decoupled_weight_decay=True), "decoupled_weight_decay is True in it"),
    (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad is True"),
    (lambda s: s["param_groups"].append(s["param_groups"][0]), "2 parameter groups"),
    (lambda s: s["param_groups"][0]["params"].pop(), "has 10 parameters, the policy 11"),
    (lambda s: s["state"].pop(0), "no state for log_std"),
    (lambda s: [s["state"].pop(i) for i in (7, 8)], "no state for critic"),
    (lambda s: s["state"][3].pop("exp_avg_sq"), "lacks exp_avg_sq: it is not Adam's"),
    (lambda s: s["state"][3].update(step=9.0), r"took \[2, 9\] steps"),
    (lambda s: s["state"][1].update(exp_avg=np.zeros((OBS, 8))), r"exp_avg of actor.0.weight is \[5, 8\]"),
)
def test_an_optimizers_state_that_does_not_fit_is_refused(change: Callable[..., Any], message: str) -> None:
    policy, config = policy_with(), OPTIMIZERS[0]
    params = init(policy)
    state = torch_optimizer_state(policy, trained_opt_state(config, params), config)
    change(state)
    refused(opt_state_from_torch, policy, params, state, config, match=message)


def test_a_critic_that_was_never_trained_has_moments_of_zero() -> None:
    """As under GRPO and APG, whose losses it is not in."""
    policy, config = policy_with(), OPTIMIZERS[0]
    params = init(policy)
    opt_state = trained_opt_state(config, params)
    there = torch_optimizer_state(policy, opt_state, config)
    critic = [i for i, key in enumerate(state_dict_from_params(policy, params)) if key.startswith("critic.")]
    for i in critic:
        del there["state"][i]
    back = opt_state_from_torch(policy, params, there, config)
    for name in ("mu", "nu"):
        moments, expected = (optax.tree_utils.tree_get(state, name) for state in (back, opt_state))
        assert_same(moments, {**expected, "critic": jax.tree.map(jnp.zeros_like, expected["critic"])})
    assert int(optax.tree_utils.tree_get(back, "count")) == 2


def test_only_adams_state_can_be_moved() -> None:
    policy, config = policy_with(), OptimizerConfig(name="sgd", kwargs={"momentum": 0.9})
    with pytest.raises(ValueError, match="'sgd' cannot be moved"):
        torch_optimizer_state(policy, trained_opt_state(config, init(policy), 1), config)
