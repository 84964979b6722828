"""Parameters and Adam's state in torch's layout: exact there and back; torch computes the same from them."""

import itertools
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.config import RunConfig
from ejax.distributions import ActionSpec
from ejax.optim import OptimizerConfig, ScheduleConfig, get_learning_rate, make_optimizer
from ejax.policies import MLP, ActorCritic, ActorOnly, NetworkConfig
from ejax.policies.mlp import ACTIVATIONS
from ejax.types import Params, Policy, Rollout, make_train_state
from interop.checkpoints.optimizer_state import opt_state_from_torch, torch_optimizer_state
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params

OBS, A = 5, 2
SPEC = ActionSpec("normal", (A,))
KEY = jax.random.key(0)
VARIANTS = [{"use_layernorm": layernorm, "dropout_p": dropout} for layernorm in (False, True) for dropout in (0.0, 0.3)]
NO_TORCH = "compares with torch"


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
    assert shapes(state_dict_from_params(policy, init(policy))) == [
        ("log_std", (A,)),
        ("actor.0.weight", (8, OBS)),
        ("actor.0.bias", (8,)),
        ("actor.2.weight", (6, 8)),
        ("actor.2.bias", (6,)),
        ("actor.4.weight", (A, 6)),
        ("actor.4.bias", (A,)),
        ("critic.0.weight", (8, OBS)),
        ("critic.0.bias", (8,)),
        ("critic.2.weight", (6, 8)),
        ("critic.2.bias", (6,)),
        ("critic.4.weight", (1, 6)),
        ("critic.4.bias", (1,)),
    ]


@pytest.mark.parametrize(
    ("variant", "modules"),
    [
        (VARIANTS[0], [0, 2, 4]),
        (VARIANTS[1], [0, 3, 6]),
        (VARIANTS[2], [0, 1, 3, 4, 6]),
        (VARIANTS[3], [0, 1, 4, 5, 8]),
    ],
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


@pytest.mark.parametrize(
    "policy",
    [
        *(ActorCritic(SPEC, network(**variant), network(**variant)) for variant in VARIANTS),
        ActorCritic(SPEC, network(), network(), critic_obs_groups=("state",)),
        ActorOnly(SPEC, NetworkConfig(hidden_sizes=())),
        ActorOnly(ActionSpec("multi_categorical", (3, 2)), network()),
        ActorCritic(ActionSpec("tanh_normal", (1,), (-1.0,), (1.0,)), network(), network()),
        policy_with(actor_obs_normalization=True),
    ],
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


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        (broken(**{"critic.2.bias": None}), "lacks critic.2.bias"),
        (broken(**{"critic.9.bias": np.zeros(1)}), "has critic.9.bias, which the policy lacks"),
        (
            {key.replace("log_std", "logstd"): x for key, x in broken().items()},
            "lacks log_std. Did you mean 'logstd'?; has logstd, which the policy lacks. Did you mean 'log_std'?",
        ),
        (broken(log_std=np.zeros(3, np.float32)), "log_std is float32[3], the policy needs float32[2]"),
        (broken(log_std=np.zeros(2)), "log_std is float64[2], the policy needs float32[2]"),
        (broken(**{"actor.0.weight": np.zeros((8, 5, 1), np.float32)}), "the policy needs float32[8, any]"),
    ],
)
def test_what_does_not_fit_is_named(state_dict: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        params_from_state_dict(policy_with(), state_dict)


def test_a_policy_without_counterpart_is_refused() -> None:
    with pytest.raises(TypeError, match="MLP has no counterpart"):
        state_dict_from_params(MLP(network(), 2), {})


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ],
)
def test_an_optimizers_state_that_does_not_fit_is_refused(change: Callable[..., Any], message: str) -> None:
    policy, config = policy_with(), OPTIMIZERS[0]
    params = init(policy)
    state = torch_optimizer_state(policy, trained_opt_state(config, params), config)
    change(state)
    with pytest.raises(ValueError, match=message):
        opt_state_from_torch(policy, params, state, config)


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


def torch_mlp(torch: Any, sizes: tuple[int, ...], config: RunConfig) -> Any:
    """Build EmbodiChain's policy for this config."""
    activations = {
        "relu": torch.nn.ReLU,
        "elu": torch.nn.ELU,
        "tanh": torch.nn.Tanh,
        "gelu": torch.nn.GELU,
        "silu": torch.nn.SiLU,
        "swish": torch.nn.SiLU,
        "none": torch.nn.Identity,
    }
    layers = []
    for size_in, size_out in itertools.pairwise(sizes[:-1]):
        layers.append(torch.nn.Linear(size_in, size_out))
        layers += [torch.nn.LayerNorm(size_out)] if config.use_layernorm else []
        layers.append(activations[config.activation]())
        layers += [torch.nn.Dropout(config.dropout_p)] if config.dropout_p else []
    layers.append(torch.nn.Linear(*sizes[-2:]))
    layers += [activations[config.last_activation]()] if config.last_activation else []
    return torch.nn.Sequential(*layers)


def torch_policy(torch: Any, policy: Policy) -> Any:
    module = torch.nn.Module()
    module.log_std = torch.nn.Parameter(torch.zeros(A))
    module.actor = torch_mlp(torch, (OBS, *policy.actor.hidden_sizes, A), policy.actor)
    module.critic = torch_mlp(torch, (OBS, *policy.critic.hidden_sizes, 1), policy.critic)
    return module


def load(torch: Any, module: Any, policy: Policy, params: Params) -> None:
    state_dict = state_dict_from_params(policy, params)
    assert list(module.state_dict()) == list(state_dict)
    module.load_state_dict({key: torch.from_numpy(x) for key, x in state_dict.items()}, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_computes_the_same_actions_and_values(activation: str, variant: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    config = NetworkConfig(hidden_sizes=(8, 6), activation=activation, last_activation=activation, **variant)
    policy = ActorCritic(SPEC, config, config)
    params = policy.init(KEY, jnp.zeros((1, OBS)))
    module = torch_policy(torch, policy).eval()
    load(torch, module, policy, params)
    obs = np.random.default_rng(0).normal(scale=2.0, size=(32, OBS)).astype(np.float32)
    distribution, value = policy.apply(params, obs)
    with torch.no_grad():
        there = torch.from_numpy(obs)
        np.testing.assert_allclose(distribution.mode(), module.actor(there), rtol=0, atol=1e-6)
        np.testing.assert_allclose(value, module.critic(there)[:, 0], rtol=0, atol=1e-6)


CONFIG = PPOConfig(
    optimizer=OPTIMIZERS[2],
    lr_scheduler=ScheduleConfig(name="linear", kwargs={"total_iters": 4}),
    n_epochs=3,
    batch_size=64,
    gamma=0.9,
    ent_coef=0.02,
    timeout_bootstrap="embodichain",
)


def make_rollout(policy: Policy, params: Params, seed: int) -> Rollout:
    rng = np.random.default_rng(seed)
    batch = (6, 4)
    obs = rng.normal(size=(*batch, OBS)).astype(np.float32)
    distribution, value = policy.apply(params, obs)
    action = distribution.mode() + rng.normal(size=(*batch, A)).astype(np.float32)
    next_value = np.concatenate([value[1:], rng.normal(size=(1, 4))]).astype(np.float32)
    return Rollout(
        obs=jnp.asarray(obs),
        action=action,
        log_prob=distribution.log_prob(action),
        value=value,
        next_value=jnp.asarray(next_value),
        reward=jnp.asarray(rng.normal(size=batch).astype(np.float32)),
        terminated=jnp.asarray(rng.random(batch) < 0.2),
        truncated=jnp.asarray(rng.random(batch) < 0.2),
    )


def torch_ppo_update(
    torch: Any, module: Any, optimizer: optax.GradientTransformation, scheduler: Any, rollout: Rollout
) -> None:
    """EmbodiChain 0.2's update with one minibatch per epoch, from its formulas."""
    r = {name: torch.from_numpy(np.array(getattr(rollout, name))) for name in ("obs", "action", "log_prob", "value")}
    reward, next_value = (torch.from_numpy(np.array(x)) for x in (rollout.reward, rollout.next_value))
    alive = 1.0 - torch.from_numpy(np.array(rollout.done)).float()
    advantage, following = torch.zeros_like(reward), torch.zeros(reward.shape[1])
    for t in reversed(range(len(reward))):
        delta = reward[t] + CONFIG.gamma * next_value[t] * alive[t] - r["value"][t]
        following = advantage[t] = delta + CONFIG.gamma * CONFIG.gae_lambda * alive[t] * following
    target = advantage + r["value"]
    advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(1e-8)
    for _ in range(CONFIG.n_epochs):
        distribution = torch.distributions.Normal(module.actor(r["obs"]), module.log_std.clamp(-5, 2).exp())
        ratio = (distribution.log_prob(r["action"]).sum(-1) - r["log_prob"]).exp()
        clipped = ratio.clamp(1 - CONFIG.clip_coef, 1 + CONFIG.clip_coef)
        actor_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_loss = torch.nn.functional.mse_loss(module.critic(r["obs"])[..., 0], target)
        entropy = distribution.entropy().sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        (actor_loss + CONFIG.vf_coef * value_loss - CONFIG.ent_coef * entropy).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CONFIG.max_grad_norm)
        optimizer.step()
    scheduler.step()


@pytest.mark.slow
def test_training_goes_on_in_torch_and_comes_back() -> None:
    """One update in ejax; the second in both; torch's result taken back."""
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    policy = policy_with()
    params = policy.init(KEY, jnp.zeros((1, OBS)))
    optimizer = make_optimizer(CONFIG.optimizer)
    state = make_train_state(params, optimizer)
    update = partial(ppo_update, policy=policy, optimizer=optimizer, config=CONFIG)
    state, _ = update(state, make_rollout(policy, params, 0), KEY)

    module = torch_policy(torch, policy)
    load(torch, module, policy, state.params)
    kwargs = {"weight_decay": 0.02}
    there = torch.optim.AdamW(module.parameters(), lr=CONFIG.optimizer.learning_rate, **kwargs)
    scheduler = torch.optim.lr_scheduler.LinearLR(there, 1.0, 0.0, 4)
    moved = torch_optimizer_state(policy, state.opt_state, CONFIG.optimizer)
    tensors = {i: {k: torch.from_numpy(x) for k, x in s.items()} for i, s in moved["state"].items()}
    assert moved["param_groups"][0].keys() | {"initial_lr"} == there.state_dict()["param_groups"][0].keys()
    there.load_state_dict({"state": tensors, "param_groups": moved["param_groups"]})
    scheduler.last_epoch = 1

    rollout = make_rollout(policy, state.params, 1)
    state, _ = update(state, rollout, KEY)
    torch_ppo_update(torch, module, there, scheduler, rollout)
    for key, x in state_dict_from_params(policy, state.params).items():
        np.testing.assert_allclose(module.state_dict()[key], x, rtol=1e-5, atol=1e-5, err_msg=key)

    back = params_from_state_dict(policy, module.state_dict())
    opt_state = opt_state_from_torch(policy, back, there.state_dict(), CONFIG.optimizer)
    assert float(get_learning_rate(opt_state)) == pytest.approx(float(get_learning_rate(state.opt_state)), rel=1e-6)
    chex.assert_trees_all_close(opt_state, state.opt_state, rtol=1e-4, atol=1e-5)
