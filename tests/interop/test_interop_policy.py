"""The torch twin against the ejax policy with the same weights."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from exports import run_without

from ejax.distributions import ActionSpec, Normal
from ejax.policies import MLP, ActorCritic, ActorOnly, NetworkConfig
from ejax.policies.mlp import ACTIVATIONS
from ejax.types import Policy
from interop.artefacts.cases import leaves_of, nest_inputs, paths_of
from interop.checkpoints.weights import state_dict_from_params
from interop.exporters.entries import get, mlp_entries
from interop.exporters.mlp import network_spec
from interop.exporters.record import spec_of
from interop.twin.kinds import spec_from_json, spec_to_json

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
interop_policy = pytest.importorskip("interop.policy")
networks = pytest.importorskip("interop.twin.networks")

WIDTH = 5
HEADS = {
    "normal": ActionSpec("normal", (3,)),
    "tanh_normal": ActionSpec("tanh_normal", (3,), (-1.0, -0.5, 0.0), (1.0, 2.0, 0.25)),
    "categorical": ActionSpec("categorical", (4,)),
    "multi_categorical": ActionSpec("multi_categorical", (2, 3)),
}


class Observed:
    """Only what ``spec_of`` asks of an environment: an observation."""

    def __init__(self, obs: Any) -> None:
        self.obs = obs

    def reset(self, key: jax.Array) -> tuple[None, Any]:
        del key
        return None, self.obs


def policy_with(action_spec: ActionSpec = HEADS["normal"], **network: Any) -> ActorCritic:
    config = NetworkConfig(hidden_sizes=(16, 8), **{"activation": "tanh", **network})
    return ActorCritic(action_spec, config, config, actor_obs_normalization=True)


def random_params(policy: Policy, obs: Any) -> Any:
    """Parameters unlike their first values: log_std beyond its range, statistics of a used normalizer."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    params = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-0.5, 0.5, x.shape), x.dtype), shapes)
    if "log_std" in params["params"]:
        params["params"]["log_std"] = jnp.array([-1.5, 0.5, 3.0])
    for statistics in params.get("normalizer", {}).values():
        statistics["variance"] = jnp.exp(2.0 * statistics["variance"])
    return params


def twin_of(policy: Any, params: Any, obs: Any) -> Any:
    first = jax.tree.map(lambda x: x[0], obs)
    spec = spec_from_json(spec_to_json(spec_of(policy, Observed(first))))  # what survives a file
    return interop_policy.make_policy(spec, state_dict_from_params(policy, params))


def observations(rows: int = 32) -> jax.Array:
    return 2.0 * jax.random.normal(jax.random.key(2), (rows, WIDTH))


def tensor(x: Any) -> Any:
    return jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf)), x)


def assert_close(actual: Any, expected: jax.Array) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), np.asarray(expected), rtol=2e-5, atol=2e-5)


def assert_twins(policy: Any, obs: Any) -> None:
    """Equal modes, values, log-probabilities and entropies."""
    params = random_params(policy, obs)
    twin = twin_of(policy, params, obs)
    distribution, value = policy.apply(params, obs)
    mode = distribution.mode()
    td = twin.get_action({"obs": tensor(obs)}, deterministic=True)
    assert_close(td["action"], mode)
    assert_close(td["sample_log_prob"], distribution.log_prob(mode))
    assert_close(td["value"], value)
    assert_close(twin.act(tensor(obs)), mode)

    if isinstance(distribution, Normal):
        assert_close(td["loc"], distribution.mean)
        assert_close(td["scale"], jnp.exp(distribution.log_std))
    else:
        assert "loc" not in td and "scale" not in td

    action = distribution.sample(jax.random.key(4))
    evaluated = twin.evaluate_actions({"obs": tensor(obs), "action": tensor(action)})
    assert_close(evaluated["sample_log_prob"], distribution.log_prob(action))
    assert_close(evaluated["entropy"], distribution.entropy())
    assert_close(evaluated["value"], value)
    # EmbodiChain's first interface: tensors in, tensors out
    for ours, its in zip((mode, distribution.log_prob(mode), value), twin.get_action(tensor(obs), True), strict=True):
        assert_close(its, ours)
    expected = (distribution.log_prob(action), distribution.entropy(), value)
    for its, ours in zip(twin.evaluate_actions(tensor(obs), tensor(action)), expected, strict=True):
        assert_close(its, ours)
    assert_close(twin.get_value(tensor(obs)), value)


@pytest.mark.parametrize("layernorm", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_with_and_without_layernorm(activation: str, layernorm: bool) -> None:
    assert_twins(policy_with(activation=activation, use_layernorm=layernorm), observations())


def test_every_activation_of_ejax_has_a_torch_module() -> None:
    assert networks.ACTIVATIONS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("head", HEADS)
def test_each_head(head: str) -> None:
    assert_twins(policy_with(HEADS[head]), observations())


def test_log_std_is_clipped_on_both_sides() -> None:
    policy, obs = policy_with(), observations()
    params = random_params(policy, obs)
    params["params"]["log_std"] = jnp.array([-7.0, 0.5, 3.0])
    log_std = twin_of(policy, params, obs).distribution(tensor(obs)).log_std
    assert_close(log_std, policy.apply(params, obs)[0].log_std)
    assert log_std[0].tolist() == [-5.0, 0.5, 2.0]


def test_dropout_keeps_the_module_numbers_and_is_off() -> None:
    assert_twins(policy_with(dropout_p=0.5, use_layernorm=True, last_activation="tanh"), observations())


def test_an_actor_alone_has_value_zero() -> None:
    assert_twins(ActorOnly(HEADS["normal"], NetworkConfig(hidden_sizes=(8,), activation="relu")), observations())


def test_actor_and_critic_read_their_groups_of_a_nested_observation() -> None:
    network = NetworkConfig(hidden_sizes=(8,), activation="tanh")
    policy = ActorCritic(
        HEADS["normal"], network, network, actor_obs_groups=("robot", "goal"), critic_obs_groups=("mass", "robot.qvel")
    )
    obs = nested_observations()
    assert_twins(policy, obs)
    twin = twin_of(policy, random_params(policy, obs), obs)
    assert twin.spec.actor.inputs == ("robot.qpos", "robot.qvel", "goal")
    assert twin.spec.critic is not None
    assert twin.spec.critic.inputs == ("mass", "robot.qvel")


def test_tensordicts_as_embodichain_uses_them() -> None:
    tensordict = pytest.importorskip("tensordict", reason="needs tensordict: pip install -e '.[torch]'")
    policy = policy_with()
    obs = observations()
    params = random_params(policy, obs)
    twin = twin_of(policy, params, obs)
    td = tensordict.TensorDict({"obs": tensor(obs)}, batch_size=[32])
    assert twin.get_action(td) is td  # written into
    assert {"action", "sample_log_prob", "value"} <= set(td.keys())
    assert not td["sample_log_prob"].requires_grad
    evaluated = twin.evaluate_actions(td)
    assert set(evaluated.keys()) == {"sample_log_prob", "entropy", "value"}  # a new one
    assert evaluated.batch_size == td.batch_size
    assert_close(evaluated["sample_log_prob"], td["sample_log_prob"].numpy())
    evaluated["sample_log_prob"].sum().backward()
    assert twin.log_std.grad is not None


def test_tensors_as_embodichains_first_versions_use_them() -> None:
    policy, obs = policy_with(), observations()
    twin = twin_of(policy, random_params(policy, obs), obs)
    assert twin.device == torch.device("cpu")
    torch.manual_seed(0)
    action, log_prob, value = twin.get_action(tensor(obs))
    assert (action.shape, log_prob.shape, value.shape) == ((32, 3), (32,), (32,)) and not log_prob.requires_grad
    assert not torch.equal(action, twin.get_action(tensor(obs), deterministic=True)[0])
    again, _, _ = twin.evaluate_actions(np.asarray(obs), action.numpy())
    torch.testing.assert_close(again, log_prob)
    again.sum().backward()
    assert twin.log_std.grad is not None
    td = twin({"observation": tensor(obs)}, deterministic=True)  # the pull request's name
    assert set(td) == {"observation", "action", "sample_log_prob", "value", "loc", "scale"}
    refused(twin.evaluate_actions, tensor(obs), word="an observation without actions; call evaluate_actions")
    refused(twin.evaluate_actions, tensor(obs), action[:, :1], word="the actions are [32, 1], must be [32, 3]")


def test_an_mlp_reshapes_its_output_as_ejaxs_does() -> None:
    config = NetworkConfig(hidden_sizes=(8,), activation="tanh", last_activation="tanh")
    params = MLP(config, (2, 3)).init(jax.random.key(0), observations())
    twin = networks.make_mlp(network_spec(config, ("obs",), normalized=False), WIDTH, (2, 3))
    entries = mlp_entries("actor", config, 6, path=("params",))
    twin.load_state_dict({e.key.removeprefix("actor."): torch.tensor(e.to_torch(get(params, e.path))) for e in entries})
    assert_close(twin(tensor(observations())), MLP(config, (2, 3)).apply(params, observations()))


def test_samples_follow_the_distribution() -> None:
    obs = observations(1)
    for head in ("normal", "categorical"):
        policy = policy_with(HEADS[head])
        params = random_params(policy, obs)
        twin = twin_of(policy, params, obs)
        torch.manual_seed(0)
        sample = twin.get_action({"obs": tensor(obs).expand(20_000, -1)})["action"]
        distribution, _ = policy.apply(params, obs)
        if head == "normal":
            deviation = np.exp(np.asarray(distribution.log_std[0]))
            np.testing.assert_allclose(sample.std(0).numpy(), deviation, rtol=0.03)
            error = (sample.mean(0).numpy() - np.asarray(distribution.mean[0])) / deviation
            assert np.abs(error).max() < 0.03  # 4 standard errors
        else:
            frequency = torch.bincount(sample, minlength=4).numpy() / 20_000
            np.testing.assert_allclose(frequency, jax.nn.softmax(distribution.logits[0]), atol=0.015)


def test_squashed_samples_stay_inside_the_bounds() -> None:
    policy = policy_with(HEADS["tanh_normal"])
    obs = observations()
    twin = twin_of(policy, random_params(policy, obs), obs)
    action = twin.get_action({"obs": tensor(obs)})["action"]
    assert (action >= torch.tensor(HEADS["tanh_normal"].low)).all()
    assert (action <= torch.tensor(HEADS["tanh_normal"].high)).all()


def test_weights_of_another_policy_are_refused() -> None:
    policy, other, obs = policy_with(), policy_with(use_layernorm=True), observations()
    with pytest.raises(RuntimeError, match="actor"):
        interop_policy.make_policy(
            spec_of(policy, Observed(obs[0])), state_dict_from_params(other, random_params(other, obs))
        )


def test_the_twin_runs_where_jax_is_missing(tmp_path: Path) -> None:
    policy, obs = policy_with(), observations(4)
    params = random_params(policy, obs)
    (tmp_path / "policy.json").write_text(spec_to_json(spec_of(policy, Observed(obs[0]))))
    state_dict = {name: torch.tensor(x) for name, x in state_dict_from_params(policy, params).items()}
    torch.save({"global_step": 0, "policy": state_dict}, tmp_path / "policy.pt")
    np.save(tmp_path / "obs.npy", np.asarray(obs))
    code = f"""
import numpy, torch
from interop.policy import load_policy
action = load_policy({str(tmp_path)!r}).act(torch.tensor(numpy.load({str(tmp_path / "obs.npy")!r})))
numpy.save({str(tmp_path / "action.npy")!r}, action.numpy())"""
    done = run_without(("jax", "ejax", "flax"), code)
    assert done.returncode == 0, done.stderr
    expected = policy.apply(params, obs)[0].mode()
    np.testing.assert_allclose(np.load(tmp_path / "action.npy"), expected, rtol=2e-5, atol=2e-5)


def nested_observations(rows: int = 32) -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(5), (rows, 7))
    return {"robot": {"qvel": x[:, :2], "qpos": x[:, 2:5]}, "goal": x[:, 5:6], "mass": x[:, 6:]}


def test_arrays_go_in_and_come_out_as_tensors_do() -> None:
    policy, obs = policy_with(), observations(4)
    twin = twin_of(policy, random_params(policy, obs), obs)
    expected = twin.act(tensor(obs))
    assert isinstance(expected, torch.Tensor)
    read_only = np.asarray(obs)
    reversed_rows, big_endian = read_only[::-1].copy()[::-1], read_only.astype(">f8")
    strided, wide = np.repeat(read_only, 2, axis=1)[:, ::2], read_only.astype(np.longdouble)
    odd = (reversed_rows, read_only[:, ::-1].copy()[:, ::-1], big_endian, strided, np.asfortranarray(read_only), wide)
    for given in (read_only, read_only.astype(np.float64), {"obs": read_only}, read_only.tolist(), *odd):
        action = twin.act(given)
        assert isinstance(action, np.ndarray)
        np.testing.assert_array_equal(action, expected.numpy())
        action *= 2.0  # it may be written into
    assert isinstance(twin.act({"obs": tensor(obs)}), torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stay_in_float32_and_layers_may_run_in_16_bits(dtype: Any) -> None:
    policy, obs = policy_with(), observations(4)
    twin = twin_of(policy, random_params(policy, obs), obs)
    expected = twin.act(tensor(obs))
    for cast in (twin.to, lambda kind: torch.nn.Sequential(twin).to(kind)):
        with pytest.raises(ValueError, match=r"got b?float16 for the weights, .* within torch.autocast"):
            cast(dtype)
    torch.testing.assert_close(twin.double().float().act(tensor(obs)), expected, rtol=0, atol=0)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(twin.act(tensor(obs)).float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("normalized", [True, False])
def test_leading_axes_of_an_observation_are_those_of_the_action(normalized: bool, head: str) -> None:
    policy, obs = policy_with(HEADS[head]).clone(actor_obs_normalization=normalized), observations(6)
    twin = twin_of(policy, random_params(policy, obs), obs)
    batched = twin.act(tensor(obs))
    for lead in ((), (1,), (2, 3)):
        rows = int(np.prod(lead))
        shaped = tensor(obs)[:rows].reshape(*lead, WIDTH)
        action = twin.act(shaped)
        assert action.shape == (*lead, *batched.shape[1:])
        torch.testing.assert_close(action.reshape(rows, *batched.shape[1:]), batched[:rows], rtol=1e-5, atol=1e-6)
        td = twin.get_action({"obs": shaped}, deterministic=True)
        assert td["value"].shape == td["sample_log_prob"].shape == lead


@pytest.fixture(scope="module")
def nested() -> tuple[Any, Any]:
    """Make the twin of an actor of two groups, and an observation for it."""
    policy = ActorOnly(HEADS["normal"], NetworkConfig(hidden_sizes=(8,)), actor_obs_groups=("robot", "goal"))
    obs = jax.tree.map(np.asarray, nested_observations(2))
    return twin_of(policy, random_params(policy, obs), obs), obs


def test_one_nested_observation_gives_one_action(nested: Any) -> None:
    twin, obs = nested
    one = jax.tree.map(lambda x: x[0], obs)
    assert twin.act(one).shape == (3,)
    by_path = {"robot.qpos": one["robot"]["qpos"], "robot.qvel": one["robot"]["qvel"], "goal": one["goal"]}
    np.testing.assert_array_equal(twin.act(by_path), twin.act(one))


@cases(
    "obs message",
    ({"state": np.zeros((2, WIDTH))}, "lacks 'obs': it has state; the policy reads obs"),
    ({}, "lacks 'obs': it has nothing; the policy reads obs"),
    (np.zeros((2, 3)), "'obs' has 3 numbers, the policy was made for 5"),
    (np.float32(0.0), "'obs' has no axis, the policy was made for 5"),
    ("text", "'obs' must be a tensor or array of numbers, got a str"),
    (None, "'obs' must be a tensor or array of numbers, got a NoneType"),
    ([[1.0], [1.0, 2.0]], "'obs' must be a tensor or array of numbers, got a list"),
    (torch.zeros(2, WIDTH).to_sparse(), r"'obs' must be a dense tensor of real numbers, got a sparse_coo tensor"),
    (torch.zeros(2, WIDTH) * 1j, r"'obs' must be a dense tensor of real numbers, got a tensor complex64"),
)
def test_an_observation_that_the_policy_cannot_read_is_an_error_that_says_so(obs: Any, message: str) -> None:
    policy, good = policy_with(), observations(2)
    twin = twin_of(policy, random_params(policy, good), good)
    refused(twin.act, obs, match=message)


def test_parts_of_a_nested_observation_that_do_not_fit_are_named(nested: Any) -> None:
    twin, obs = nested
    for wrong, message in (
        (
            {"robot": {"qpos": obs["robot"]["qpos"]}, "goal": obs["goal"]},
            r"lacks 'robot\.qvel': it has robot\.qpos, goal; the policy reads robot\.qpos, robot\.qvel, goal",
        ),
        ({**obs, "goal": obs["goal"][0]}, r"of one batch, got robot\.qpos \[2, 3\], robot\.qvel \[2, 2\], goal \[1\]"),
        (torch.zeros(2, 7), "got a single Tensor; pass a mapping"),
    ):
        refused(twin.act, wrong, match=message)


def test_an_export_that_lacks_what_it_takes_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"policy\.json: use a folder that ejax export RUN"):
        interop_policy.load_policy(tmp_path / "none")
    policy, obs = policy_with(), observations(2)
    (tmp_path / "policy.json").write_text(spec_to_json(spec_of(policy, Observed(obs[0]))))
    with pytest.raises(FileNotFoundError, match=r"policy\.pt: use a folder .* with this format among its --formats"):
        interop_policy.load_policy(tmp_path)
    for content, message in (
        ({}, r"must hold a state_dict as 'policy', got None"),
        ({"policy": [1]}, r"must hold a state_dict as 'policy', got a list of 1"),
        ({"policy": {"log_std": "text"}}, r"'policy\.log_std' must be a dense tensor of finite numbers, got 'text'"),
        ({"policy": {"log_std": torch.tensor([torch.nan])}}, r"with NaN or infinity"),
        ([1], r"holds a list, a checkpoint is a mapping"),
    ):
        torch.save(content, tmp_path / "policy.pt")
        refused(interop_policy.load_policy, tmp_path, match=message)
    (tmp_path / "policy.pt").write_bytes(b"hello")
    refused(interop_policy.load_policy, str(tmp_path), match=r"not a torch file, or is damaged|more than tensors")


def odd_observation() -> dict[str, Any]:
    """Keys that hold dots, slashes and more; joined and split again they would nest otherwise, in another order."""
    widths = {"state.joint": 2, "state": 1, "a.b": 3, "a-b": 1, "100% x": 2}
    rows = observations()
    flat = {name: rows[:, i : i + width] for i, (name, width) in enumerate(widths.items())}
    return flat | {"robot": {"q.pos": rows[:, :2], "q/vel": rows[:, 2:]}}


@pytest.mark.parametrize("groups", [(), ("state.joint", "robot", "state"), ("robot.q.pos", "a-b")])
def test_keys_with_dots_are_read_in_the_same_places(groups: tuple[str, ...]) -> None:
    config = NetworkConfig(hidden_sizes=(8,), activation="tanh")
    policy = ActorCritic(HEADS["normal"], config, config, actor_obs_groups=groups, critic_obs_groups=groups)
    assert_twins(policy, odd_observation())


def test_an_observation_nests_as_it_was_and_its_paths_stay_out_of_the_file() -> None:
    for obs in (odd_observation(), {"obs": jnp.ones((2, 3))}, jnp.ones((2, 3)), {"a": {"b": jnp.ones((2, 1))}}):
        paths = paths_of(obs)
        assert jax.tree.structure(nest_inputs(leaves_of(obs), paths)) == jax.tree.structure(obs)
    assert paths == (), "a name alone tells how it nests"
    spec = spec_of(policy_with(), Observed(jax.tree.map(lambda x: x[0], odd_observation())))
    assert spec.paths and "paths" not in json.loads(spec_to_json(spec))


def test_an_observation_that_one_name_would_mean_twice_is_refused() -> None:
    twin = twin_of(policy_with(), random_params(policy_with(), {"a.b": observations()}), {"a.b": observations()})
    with pytest.raises(ValueError, match=r"two arrays of the observation are called 'a\.b'"):
        twin.act(tensor({"a.b": observations(), "a": {"b": observations()}}))
