"""Networks start as torch's do and compute what torch's compute; policies work with the functions around them."""

import math
import re
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from gymnasium import spaces

from ejax.algorithms.ppo import PPOConfig, ppo_update
from ejax.config import RunConfig
from ejax.distributions import ActionSpec, Normal, action_spec
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.optim import make_optimizer
from ejax.policies import (
    MLP,
    ActorCritic,
    ActorOnly,
    NetworkConfig,
    build_mlp_from_cfg,
    evaluate_actions,
    get_action,
    get_value,
)
from ejax.policies.flash import FlashQ
from ejax.policies.mlp import dense_product, orthogonal
from ejax.policies.normalize import update_normalizer
from ejax.policies.observations import flatten_observation, select_observation, without
from ejax.policies.recurrence import MemoryConfig, Recurrence
from ejax.policies.vision import VisionPolicy
from ejax.rollout import reset, unroll
from ejax.types import Params, make_train_state

SMALL = NetworkConfig(hidden_sizes=(8, 6), activation="tanh")
TWO = ActionSpec("normal", (2,))
KEY = jax.random.key(0)
OBS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
SEEDS = jnp.arange(5, dtype=jnp.uint32)


def mlp_params(config: RunConfig, size: int = 3, output_dim: int = 2) -> Any:
    return jax.jit(MLP(config, output_dim).init)(KEY, jnp.zeros((1, size)))["params"]


def numpy_mlp(params: Params, x: Any, activation: str, *, layernorm: bool = False) -> np.ndarray:
    for i in range(3):
        x = x @ np.asarray(params[f"linear_{i}"]["kernel"]) + np.asarray(params[f"linear_{i}"]["bias"])
        if i == 2:
            return x
        if layernorm:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        x = activation(x)
    return x


def test_linear_layers_start_as_torchs_do() -> None:
    # U(±1/√fan_in) for weights and biases
    params = mlp_params(NetworkConfig(hidden_sizes=(400,)), size=100)
    for layer, fan_in in (("linear_0", 100), ("linear_1", 400)):
        bound = 1.0 / math.sqrt(fan_in)
        for leaf in params[layer].values():
            assert jnp.abs(leaf).max() <= bound
    kernel = params["linear_0"]["kernel"]
    assert jnp.abs(kernel).max() > 0.099
    assert float(kernel.std()) == pytest.approx(0.1 / math.sqrt(3.0), rel=0.02)
    assert float(jnp.abs(params["linear_0"]["bias"]).max()) > 0.09


def test_orthogonal_init_takes_a_gain_for_each_layer() -> None:
    params = mlp_params(NetworkConfig(hidden_sizes=(8, 6), orthogonal_init=(1.4, 0.5, 0.01)))
    for i, gain in enumerate((1.4, 0.5, 0.01)):
        kernel = np.asarray(params[f"linear_{i}"]["kernel"])
        np.testing.assert_allclose(np.linalg.svd(kernel, compute_uv=False), gain, rtol=1e-4)
        assert not np.asarray(params[f"linear_{i}"]["bias"]).any()


def test_orthogonal_init_needs_as_many_gains_as_layers() -> None:
    refused(NetworkConfig, hidden_sizes=(8, 6), orthogonal_init=(1.0, 0.1), match=r"3 Linear layers.*got 2")


ORTHOGONAL: dict[str, nn.Module] = {
    "mlp": MLP(NetworkConfig(hidden_sizes=(8, 6), orthogonal_init=1.0), 2),
    "flash_q": FlashQ(ActionSpec("tanh_normal", (2,), (-1.0, -1.0), (1.0, 1.0)), actor_width=6, critic_width=5),
    "lstm": Recurrence(MemoryConfig(type="lstm", hidden_size=4, orthogonal_init=True)),
}


@pytest.mark.parametrize("kind", ORTHOGONAL)
def test_orthogonal_weights_of_members_are_factorized_one_by_one(kind: str) -> None:
    # as many batches as cores, in one program, wait for each other for ever in jaxlib 0.10
    init, x = ORTHOGONAL[kind].init, jnp.zeros((1, 3))
    given = (x, jnp.zeros((1, 8))) if kind == "lstm" else (x,)
    program = jax.jit(jax.vmap(lambda key: init(key, *given))).lower(jax.random.split(KEY, 2)).as_text()
    shapes = re.findall(r"custom_call @lapack_sgeqrf_ffi\(.*: \(tensor<([0-9x]+)xf32>\)", program)
    assert shapes and all(shape.count("x") == 1 for shape in shapes), shapes


def test_orthogonal_weights_are_those_of_jax_for_one_and_for_members() -> None:
    made, expected = orthogonal(1.4), jax.nn.initializers.orthogonal(1.4)
    keys = jax.random.split(KEY, 6)
    each = [np.asarray(expected(key, (7, 4))) for key in keys]
    np.testing.assert_array_equal(made(keys[0], (7, 4)), each[0])
    members = jax.jit(jax.vmap(jax.vmap(lambda key: made(key, (7, 4)))))(keys.reshape(3, 2))
    np.testing.assert_array_equal(members.reshape(6, 7, 4), each)


@pytest.mark.parametrize("layernorm", [False, True])
def test_mlp_is_linear_then_layernorm_then_activation(layernorm: bool) -> None:
    config = NetworkConfig(hidden_sizes=(8, 6), activation="tanh", use_layernorm=layernorm)
    params = mlp_params(config)
    expected = numpy_mlp(params, OBS, np.tanh, layernorm=layernorm)
    np.testing.assert_allclose(MLP(config, 2).apply({"params": params}, OBS), expected, rtol=1e-4, atol=1e-5)


def test_an_output_of_a_shape_is_that_of_its_size_row_by_row() -> None:
    config = NetworkConfig(hidden_sizes=(8,), last_activation="tanh")
    params = MLP(config, (2, 3)).init(KEY, OBS)
    chex.assert_trees_all_equal(params, MLP(config, 6).init(KEY, OBS))
    shaped = MLP(config, (2, 3)).apply(params, OBS[None])
    assert shaped.shape == (1, 5, 2, 3)
    np.testing.assert_array_equal(shaped.reshape(1, 5, 6), MLP(config, 6).apply(params, OBS[None]))
    for wrong in (0, (), (2, 0)):
        refused(MLP(config, wrong).init, KEY, OBS, match=r"output_dim must be a size or a shape .* got")


def test_an_mlp_is_made_of_a_block_of_a_config() -> None:
    fields = {"hidden_sizes": [8, 6], "activation": "ReLU", "orthogonal_init": [1.4, 0.5, 0.01]}
    expected = NetworkConfig(hidden_sizes=(8, 6), activation="relu", orthogonal_init=(1.4, 0.5, 0.01))
    for block in ({"type": "mlp", **fields}, {"type": "MLP", "network_cfg": fields}):
        assert build_mlp_from_cfg(block, 3, (2, 3)) == MLP(expected, (2, 3), 3)
    with pytest.raises(ValueError, match=r"made for 4 inputs, got 3: x is \[5, 3\]"):
        build_mlp_from_cfg({"hidden_sizes": []}, 4, 2).init(KEY, OBS)
    refused(build_mlp_from_cfg, {"type": "cnn", **fields}, 3, 2, match="got 'cnn'; allowed: mlp")
    with pytest.raises(ValueError, match="got activation next to network_cfg"):
        build_mlp_from_cfg({"network_cfg": {"hidden_sizes": [8]}, "activation": "relu"}, 3, 2)
    refused(build_mlp_from_cfg, {"type": "mlp", **fields, "activation": "reLU6"}, 3, 2, match="relu6")


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    "network",
    [
        MLP(SMALL, 2),
        ActorCritic(TWO, SMALL, SMALL),
        ActorCritic(TWO, SMALL, SMALL, actor_obs_normalization=True),
        Recurrence(MemoryConfig(type="gru", hidden_size=4)),
        FlashQ(
            ActionSpec("tanh_normal", (2,), (-1.0, -1.0), (1.0, 1.0)),
            actor_width=6,
            critic_width=5,
            num_blocks=2,
            expansion=2,
            num_bins=7,
        ),
    ],
)
def test_inputs_of_another_width_than_that_of_the_parameters_are_refused(network: nn.Module, width: int) -> None:
    memory = [jnp.zeros((5, 4))] if isinstance(network, Recurrence) else []
    params = network.init(KEY, OBS, *memory)
    refused(network.apply, params, np.zeros((5, width)), *memory, word=f"was made for 3 inputs; got {width}")


def test_layernorm_has_torchs_epsilon() -> None:
    # inputs so alike that the epsilon is what they are divided by
    config = NetworkConfig(hidden_sizes=(2,), activation="none", use_layernorm=True)
    params = mlp_params(config, size=2)
    params["linear_0"] = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    params["linear_1"] = {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    output = MLP(config, 2).apply({"params": params}, jnp.array([[1e-3, -1e-3]]))
    np.testing.assert_allclose(output[0], np.array([1e-3, -1e-3]) / math.sqrt(1e-6 + 1e-5), rtol=1e-4)


@cases(
    "name formula",
    ("relu", lambda x: max(x, 0.0)),
    ("elu", lambda x: x if x > 0 else math.expm1(x)),
    ("tanh", math.tanh),
    ("gelu", lambda x: 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))),  # exact, not the tanh approximation
    ("silu", lambda x: x / (1.0 + math.exp(-x))),
    ("swish", lambda x: x / (1.0 + math.exp(-x))),
    ("none", lambda x: x),
)
def test_activations_are_torchs(name: str, formula: Callable[..., Any]) -> None:
    config = NetworkConfig(hidden_sizes=(), last_activation=name)
    x = np.linspace(-3.0, 3.0, 13, dtype=np.float32)[:, None]
    params = {"linear_0": {"kernel": jnp.eye(1), "bias": jnp.zeros(1)}}
    output = MLP(config, 1).apply({"params": params}, x)
    np.testing.assert_allclose(output[:, 0], [formula(v) for v in x[:, 0].tolist()], rtol=1e-5, atol=1e-6)


def test_the_precision_of_float32_products_does_not_widen_those_of_bfloat16() -> None:
    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return dense_product(x, w).sum().astype(jnp.float32)

    shape = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    with jax.default_matmul_precision("TF32_TF32_F32"):
        traced = jax.jit(jax.grad(total, argnums=(0, 1))).trace(shape, shape)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 2 and all("tensor<4x4xf32>" not in line for line in products)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["tanh", "elu", "gelu"])
def test_bf16_stores_hidden_layers_in_bfloat16_and_the_rest_in_float32(activation: Any) -> None:
    config = NetworkConfig(hidden_sizes=(128, 96), activation=activation)
    key = jax.random.key(0)
    x, target = jax.random.normal(key, (512, 20)), jax.random.normal(jax.random.key(1), (512, 5))
    params = mlp_params(config, size=20, output_dim=5)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = MLP(config, 5).apply({"params": params}, x)
        return jnp.mean((output - target) ** 2), output

    def run() -> Any:  # a function of its own each time: a trace is of one precision
        graded = jax.value_and_grad(lambda params, x: loss(params, x), argnums=(0, 1), has_aux=True)
        return jax.jit(graded)(params, x)

    (_, output), gradients = run()
    with jax.default_matmul_precision("BF16_BF16_F32"):
        (_, narrow_output), narrow_gradients = run()
        _, backward = jax.vjp(lambda params: loss(params, x)[0], params)
    hidden = [each for each in jax.tree.leaves(backward) if each.shape in ((512, 128), (512, 96))]
    assert hidden and {each.dtype for each in hidden} <= {jnp.dtype(jnp.bfloat16), jnp.dtype(bool)}
    assert all(each.dtype == jnp.float32 for each in jax.tree.leaves((narrow_output, narrow_gradients)))
    for exact, narrow in zip(
        jax.tree.leaves((output, gradients)), jax.tree.leaves((narrow_output, narrow_gradients)), strict=True
    ):
        assert 1e-6 < jnp.linalg.norm(narrow - exact) / jnp.linalg.norm(exact) < 1.5e-2  # of the rounding: 2^-9 each


@pytest.fixture(scope="module")
def dropout() -> Callable[..., Any]:
    config = NetworkConfig(hidden_sizes=(200,), activation="none", dropout_p=0.25)
    params = {
        "linear_0": {"kernel": jnp.zeros((3, 200)), "bias": jnp.ones(200)},
        "linear_1": {"kernel": jnp.eye(200), "bias": jnp.zeros(200)},
    }
    return jax.jit(lambda obs, seed: MLP(config, 200).apply({"params": params}, obs, seed))


def test_dropout_scales_what_it_keeps(dropout: Callable[..., Any]) -> None:
    units = np.asarray(dropout(OBS, SEEDS))
    assert set(np.unique(units)) == {np.float32(0.0), np.float32(1.0) / np.float32(0.75)}
    assert (units == 0.0).mean() == pytest.approx(0.25, abs=0.04)


def test_a_row_drops_the_same_units_wherever_it_is_in_the_batch(dropout: Callable[..., Any]) -> None:
    shuffled = np.array([3, 1, 4, 0, 2])
    np.testing.assert_array_equal(dropout(OBS, SEEDS)[shuffled], dropout(OBS[shuffled], SEEDS[shuffled]))


def test_rows_with_other_seeds_drop_other_units(dropout: Callable[..., Any]) -> None:
    units = np.asarray(dropout(OBS, SEEDS))
    assert len(np.unique(units, axis=0)) == len(units)


def test_dropout_is_off_without_a_seed(dropout: Callable[..., Any]) -> None:
    np.testing.assert_array_equal(dropout(OBS, None), np.ones((5, 200)))


@pytest.fixture(scope="module")
def actor_critic() -> tuple[ActorCritic, Any]:
    policy = ActorCritic(TWO, SMALL, SMALL, initial_log_std=-0.5)
    return policy, policy.init(KEY, OBS)


def test_actor_critic_is_two_mlps_and_a_log_std(actor_critic: tuple[ActorCritic, Any]) -> None:
    policy, params = actor_critic
    distribution, value = policy.apply(params, OBS)
    trained = params["params"]
    np.testing.assert_allclose(distribution.mean, numpy_mlp(trained["actor"], OBS, np.tanh), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(value, numpy_mlp(trained["critic"], OBS, np.tanh)[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(distribution.log_std, np.full((5, 2), -0.5))


def test_get_action_gives_one_row_of_each_for_every_observation(actor_critic: tuple[ActorCritic, Any]) -> None:
    policy, params = actor_critic
    action, log_prob, value = get_action(policy, params, OBS, KEY)
    assert (action.shape, log_prob.shape, value.shape) == ((5, 2), (5,), (5,))


def test_evaluating_an_action_gives_the_log_prob_it_was_taken_with(actor_critic: tuple[ActorCritic, Any]) -> None:
    policy, params = actor_critic
    action, log_prob, value = get_action(policy, params, OBS, KEY)
    again, entropy, value_again = evaluate_actions(policy, params, OBS, action)
    np.testing.assert_allclose(again, log_prob, rtol=1e-5)
    np.testing.assert_allclose(value_again, value, rtol=1e-5)
    np.testing.assert_allclose(get_value(policy, params, OBS), value, rtol=1e-5)
    np.testing.assert_allclose(entropy, 2 * (0.5 + 0.5 * math.log(2 * math.pi) - 0.5), rtol=1e-5)
    with pytest.raises(ValueError, match=r"evaluate_actions takes actions as the policy draws them: .*shapes"):
        evaluate_actions(policy, params, OBS, action[..., 0])


def test_a_deterministic_action_is_the_mean(actor_critic: tuple[ActorCritic, Any]) -> None:
    policy, params = actor_critic
    action, *_ = get_action(policy, params, OBS, KEY, deterministic=True)
    np.testing.assert_allclose(action, policy.apply(params, OBS)[0].mean, rtol=1e-5, atol=1e-6)


def test_actor_only_has_no_critic_and_value_zero() -> None:
    policy = ActorOnly(TWO, SMALL)
    params = policy.init(KEY, OBS)
    assert set(params["params"]) == {"actor", "log_std"}
    assert policy.apply(params, OBS)[1].tolist() == [0.0] * 5


@cases("log_std used slope", (-6.0, -5.0, 0.0), (-5.0, -5.0, 1.0), (0.3, 0.3, 1.0), (2.0, 2.0, 1.0), (3.0, 2.0, 0.0))
def test_log_std_is_clamped_as_torch_clamps(actor_critic: tuple, log_std: float, used: float, slope: float) -> None:
    policy, params = actor_critic

    def first(x: Any) -> Any:
        moved = {"params": {**params["params"], "log_std": jnp.full(2, x)}}
        return policy.apply(moved, OBS)[0].log_std[0, 0]

    value, gradient = jax.value_and_grad(first)(log_std)
    assert value == pytest.approx(used)
    assert gradient == pytest.approx(slope)  # half of the clamp's at its bounds would be jnp.clip's


NESTED = {"b": {"y": jnp.ones((4, 1)), "x": jnp.full((4, 2), 2.0)}, "a": jnp.full((4, 3), 3.0)}


def test_observations_flatten_depth_first_in_the_order_of_sorted_names() -> None:
    assert flatten_observation(NESTED)[0].tolist() == [3.0, 3.0, 3.0, 2.0, 2.0, 1.0]


def test_obs_groups_select_by_path_in_the_order_given() -> None:
    assert select_observation(NESTED, ("b.y", "a"))[0].tolist() == [1.0, 3.0, 3.0, 3.0]
    assert select_observation(NESTED, ("b",))[0].tolist() == [2.0, 2.0, 1.0]


def test_an_obs_group_that_is_not_there_is_named() -> None:
    refused(select_observation, NESTED, ("b.z",), match=r"b\.z.*a, b\.x, b\.y")
    refused(flatten_observation, {}, match="no array")


def test_actor_and_critic_may_see_different_parts() -> None:
    policy = ActorCritic(TWO, SMALL, SMALL, actor_obs_groups=("a",), critic_obs_groups=("a", "b"))
    params = policy.init(KEY, NESTED)["params"]
    assert params["actor"]["linear_0"]["kernel"].shape == (3, 8)
    assert params["critic"]["linear_0"]["kernel"].shape == (6, 8)


@pytest.fixture(scope="module")
def observed() -> tuple[ActorCritic, Any, np.ndarray]:
    """Return a normalizing policy after three batches of observations, and these."""
    policy = ActorCritic(TWO, SMALL, SMALL, actor_obs_normalization=True, critic_obs_normalization=True)
    rng = np.random.default_rng(3)
    batches = [rng.normal(2.0, 3.0, size=(2, rows, 3)).astype(np.float32) for rows in (5, 5, 1)]
    params = policy.init(KEY, OBS)
    for batch in batches:
        _, updated = policy.apply(params, batch, observe=True, mutable=["normalizer"])
        params = {**params, **updated}
    return policy, params, np.concatenate([batch.reshape(-1, 3) for batch in batches])


@pytest.mark.slow
def test_normalizer_statistics_are_those_of_all_rows_seen(observed: tuple[ActorCritic, Any, np.ndarray]) -> None:
    _, params, rows = observed
    for name in ("actor_obs_normalizer", "critic_obs_normalizer"):
        statistics = params["normalizer"][name]
        assert statistics["count"] == len(rows)
        np.testing.assert_allclose(statistics["mean"], rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(statistics["variance"], rows.var(0), rtol=1e-4)


def test_networks_see_observations_normalized_by_the_statistics(observed: tuple[ActorCritic, Any, np.ndarray]) -> None:
    policy, params, rows = observed
    normalized = (OBS - rows.mean(0)) / (rows.std(0) + 1e-2)
    expected = numpy_mlp(params["params"]["actor"], normalized, np.tanh)
    np.testing.assert_allclose(policy.apply(params, OBS)[0].mean, expected, rtol=1e-3, atol=1e-4)


def test_statistics_stay_without_observe(observed: tuple[ActorCritic, Any, np.ndarray]) -> None:
    policy, params, _ = observed
    _, after = policy.apply(params, OBS, mutable=["normalizer"])
    chex.assert_trees_all_equal(after["normalizer"], params["normalizer"])


def test_discrete_policies_have_logits_and_no_log_std() -> None:
    policy = ActorCritic(action_spec(spaces.Discrete(4)), SMALL, SMALL)
    params = policy.init(KEY, OBS)
    assert "log_std" not in params["params"]
    assert policy.apply(params, OBS)[0].logits.shape == (5, 4)
    action, log_prob, _ = get_action(policy, params, OBS, KEY)
    assert action.shape == (5,) and action.dtype == jnp.int32 and (log_prob < 0.0).all()


def test_multi_discrete_policies_choose_once_for_each_dimension() -> None:
    policy = ActorCritic(action_spec(spaces.MultiDiscrete([4, 3])), SMALL, SMALL)
    params = policy.init(KEY, OBS)
    action, log_prob, _ = get_action(policy, params, OBS, KEY)
    assert action.shape == (5, 2) and log_prob.shape == (5,)
    assert (action < jnp.array([[4, 3]])).all()
    logits, _ = policy.apply(params, OBS)
    assert [part.logits.shape for part in logits.parts] == [(5, 4), (5, 3)]


class Plain(nn.Module):
    """A user's module: no keyword arguments, nothing of ejax but a distribution."""

    @nn.compact
    def __call__(self, obs: Any) -> tuple[Normal, Any]:
        log_std = self.param("log_std", nn.initializers.zeros, (2,))
        mean = nn.Dense(2)(obs)
        return Normal(mean, jnp.broadcast_to(log_std, mean.shape)), nn.Dense(1)(obs)[..., 0]


@pytest.mark.slow
def test_a_plain_linen_module_acts_unrolls_and_learns() -> None:
    policy, env, config = Plain(), PointMassRL(), PPOConfig(n_epochs=1, batch_size=8)
    optimizer = make_optimizer(config.optimizer)
    carry = reset(env, KEY, 4)
    params = policy.init(KEY, carry.obs)
    assert get_action(policy, params, carry.obs, KEY)[0].shape == (4, 2)
    rollout, _ = unroll(policy, env, params, carry, KEY, num_steps=2)
    state = make_train_state(params, optimizer)
    state, _ = ppo_update(state, rollout, KEY, policy=policy, optimizer=optimizer, config=config)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), params["params"], state.params["params"])
    assert all(jax.tree.leaves(moved))


def statistics(params: Params) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(params["normalizer"])]


@pytest.fixture(scope="module")
def normalizing() -> tuple[ActorCritic, Any]:
    policy = ActorCritic(TWO, SMALL, SMALL, actor_obs_normalization=True, critic_obs_normalization=True)
    params = policy.init(KEY, OBS)
    return policy, update_normalizer(policy, params, OBS + 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_are_not_finite_do_not_enter_the_statistics(normalizing: tuple, bad: float, masked: bool) -> None:
    policy, params = normalizing
    rows = np.random.default_rng(1).normal(size=(4, 3, 3)).astype(np.float32)
    rows[1, 2, 0] = rows[3, 0, 2] = bad
    valid = np.ones((4, 3), bool)
    if masked:
        valid[0] = valid[3, 0] = False  # a row that does not count may hold anything
    sound = rows.reshape(-1, 3)[(valid & np.isfinite(rows).all(axis=-1)).reshape(-1)]
    broken = update_normalizer(policy, params, rows, jnp.asarray(valid) if masked else None)
    for got, expected in zip(statistics(broken), statistics(update_normalizer(policy, params, sound)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert np.isfinite(get_value(policy, broken, OBS)).all()


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_rows_that_leave_nothing_finite_change_no_statistics(normalizing: tuple, value: float) -> None:
    policy, params = normalizing
    spread = np.full((4, 3), value, np.float32) * np.array([1, -1, 1, -1], np.float32)[:, None]  # (3e38)² overflows
    after = update_normalizer(policy, params, spread)
    chex.assert_trees_all_equal(after["normalizer"], params["normalizer"])
    assert np.isfinite(get_value(policy, after, OBS)).all()


def test_statistics_are_those_of_all_rows_merged(normalizing: tuple[ActorCritic, Any]) -> None:
    policy, params = normalizing
    more = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
    rows = np.concatenate([OBS + 1.0, more])
    count, mean, variance = statistics(update_normalizer(policy, params, more))[:3]
    assert count == 12.0
    np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-5)


@pytest.mark.slow
def test_one_nan_in_a_rollout_does_not_end_a_training() -> None:
    """With normalization a single NaN observation made every action and value NaN from then on."""
    env = PointMassRL(max_episode_steps=5)
    policy = ActorCritic(action_spec(env.action_space), SMALL, SMALL, actor_obs_normalization=True)
    envs = reset(env, KEY, 4)
    config = PPOConfig(batch_size=8, n_epochs=1)
    optimizer = make_optimizer(config.optimizer)
    params = policy.init(KEY, envs.obs)
    state = make_train_state(params, optimizer)
    envs = envs.replace(obs=envs.obs.at[1].set(jnp.nan))
    skipped = []
    for i in range(3):
        rollout, envs = unroll(policy, env, state.params, envs, jax.random.key(i), num_steps=4)
        state, metrics = ppo_update(state, rollout, KEY, policy=policy, optimizer=optimizer, config=config)
        skipped.append(float(metrics["skipped_minibatches"]))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert skipped == [2.0, 0.0, 0.0]  # that environment started again at once


@pytest.mark.parametrize("width", [1, 8, 40])
def test_a_gradient_of_weights_copies_the_narrower_side_alone(width: int) -> None:
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(96, 24), (24, width)]))
    value_and_grad = jax.jit(jax.value_and_grad(lambda w, x: jnp.sin(dense_product(jnp.tanh(x), w)).sum()))
    reference = jax.value_and_grad(lambda w, x: jnp.sin(jnp.tanh(x) @ w).sum())
    chex.assert_trees_all_close(value_and_grad(w, x), reference(w, x), rtol=1e-5, atol=1e-5)
    made = re.findall(r"= f32\[(\d+),96\]", value_and_grad.lower(w, x).compile().as_text())  # columns: transposes
    assert set(made) == {str(min(width, 24))}


def test_keys_with_dots_are_named_as_they_are() -> None:
    obs = {"observation.state": jnp.ones((4, 1)), "observation": jnp.full((4, 2), 2.0), "n": {"a.b": jnp.zeros((4, 1))}}
    assert select_observation(obs, ("observation.state", "n"))[0].tolist() == [1.0, 0.0]
    assert select_observation(obs, ("observation", "n.a.b"))[0].tolist() == [2.0, 2.0, 0.0]
    assert without(obs, ("n.a.b", "observation")) == {"observation.state": obs["observation.state"]}
    refused(flatten_observation, {"n.a": jnp.ones(1), "n": {"a": jnp.zeros(1)}}, match="reads like a part of")


def test_pictures_whose_encoders_would_have_one_name_are_refused() -> None:
    policy = VisionPolicy(TWO, SMALL, SMALL, images=("cam.l", "cam_l"))
    with pytest.raises(ValueError, match="two encoders are called 'encoder_cam_l'"):
        policy.init(KEY, {name: jnp.zeros((1, 32, 32, 3), jnp.uint8) for name in policy.images})
