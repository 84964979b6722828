"""Rollouts in EmbodiChain's layouts: there and back without a changed bit; its observation helpers."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from ejax.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from ejax.returns import gae
from ejax.types import Rollout
from interop.tensordict import (
    dict_to_tensordict,
    flatten_dict_observation,
    rollout_from_dict,
    rollout_from_tensordict,
    rollout_to_dict,
    rollout_to_tensordict,
)

torch = pytest.importorskip("torch", reason="TensorDict is torch's")
tensordict = pytest.importorskip("tensordict")

LAYOUTS = ("head", "pr122", "seed")
DTYPES = ("float32", "float16", "bfloat16", "bool", "int8", "uint8", "int16", "int32", "uint16", "uint32")
OBS_SHAPES = (
    (3,),
    {"goal": (2,), "robot": {"qpos": (3,), "camera": (2, 2, 3)}},
    {"obs": (3,), "critic_obs": (5,)},
    {"empty": (0,), "scalar": ()},
)
KINDS = ("none", "normal", "tanh_normal", "categorical", "multi_categorical")


def array(rng: np.random.Generator, shape: Any, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(scale=50.0, size=shape).astype(dtype))


def distribution(kind: str, array: Any) -> Any:
    mean, log_std = array((2,)), array((2,)) / 50.0
    return {
        "normal": Normal(mean, log_std),
        "tanh_normal": TanhNormal(Normal(mean, log_std), array((2,)), array((2,))),
        "categorical": Categorical(array((4,))),
        "multi_categorical": MultiCategorical((Categorical(array((4,))), Categorical(array((2,))))),
    }[kind]


def make_rollout(
    num_steps: int = 3,
    num_envs: int = 2,
    shapes: Any = OBS_SHAPES[1],
    dtype: str = "float32",
    kind: str = "none",
    seed: int = 0,
) -> tuple[Rollout, Any]:
    rng = np.random.default_rng(seed)
    batch = (num_steps, num_envs)

    def obs(lead: Any) -> Any:
        return jax.tree.map(lambda s: array(rng, (*lead, *s), dtype), shapes, is_leaf=lambda s: isinstance(s, tuple))

    dropout_seed = jnp.asarray(rng.integers(0, 2**32, batch, np.uint32))
    acting = None if kind == "none" else distribution(kind, lambda shape: array(rng, (*batch, *shape)))
    discrete = kind == "categorical"
    rollout = Rollout(
        obs=obs(batch),
        action=array(rng, batch, "int32") if discrete else array(rng, (*batch, 2)),
        log_prob=array(rng, batch),
        value=array(rng, batch),
        next_value=array(rng, batch),
        reward=array(rng, batch),
        terminated=jnp.asarray(rng.random(batch) < 0.3),
        truncated=jnp.asarray(rng.random(batch) < 0.3),
        dropout_seed=dropout_seed,
        distribution=acting,
    )
    return rollout, obs((num_envs,))


rollouts = st.builds(
    make_rollout,
    num_steps=st.integers(1, 4),
    num_envs=st.integers(1, 4),
    shapes=st.sampled_from(OBS_SHAPES),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16),
)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        where = jax.tree_util.keystr(path)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), where
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), where


@settings(deadline=None, max_examples=30)
@given(rollouts, st.sampled_from(LAYOUTS), st.booleans())
def test_a_tensordict_or_a_dict_and_back_changes_no_bit(made: Any, layout: Any, copy: Any) -> None:
    rollout, last_obs = made
    td = rollout_to_tensordict(rollout, layout, last_obs=last_obs, copy=copy)
    num_steps, num_envs = rollout.reward.shape
    batch = {"head": (num_envs, num_steps + 1), "pr122": (num_envs, num_steps), "seed": (num_steps, num_envs)}
    assert td.batch_size == batch[layout]
    data = rollout_to_dict(rollout, layout, last_obs=last_obs)
    for back, last in (rollout_from_tensordict(td, layout, copy=copy), rollout_from_dict(data, layout)):
        assert_same(back, rollout)
        if layout != "seed":
            assert_same(last, last_obs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mapping_of_tensors_needs_no_tensordict(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, last_obs = make_rollout(shapes=(3,))
    data = jax.tree.map(torch.from_numpy, rollout_to_dict(rollout, layout, last_obs=last_obs))
    monkeypatch.setitem(sys.modules, "tensordict", None)  # whose import then fails
    back, _ = rollout_from_tensordict(data, layout)
    assert np.array_equal(back.action, rollout.action)
    assert flatten_dict_observation({"a": torch.ones(2, 3), "b": np.ones(2)}).shape == (2, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dict_and_a_tensordict_hold_the_same(layout: str) -> None:
    rollout, last_obs = make_rollout(kind="normal")
    data = rollout_to_dict(rollout, layout, last_obs=last_obs)
    td = rollout_to_tensordict(rollout, layout, last_obs=last_obs).to_dict()
    rounded = {"action_std", "scale"}  # exp of two libraries
    assert jax.tree.structure(data) == jax.tree.structure(td)
    for name in data.keys() - rounded:
        assert_same(data[name], jax.tree.map(lambda x: x.numpy(), td[name]))
    for name in data.keys() & rounded:
        np.testing.assert_allclose(td[name], data[name], rtol=1e-6)


def test_head_pads_all_but_observation_and_value() -> None:
    rollout, last_obs = make_rollout(shapes=(3,), kind="normal")
    data = rollout_to_dict(rollout, "head", last_obs=last_obs)
    assert {name: x.shape for name, x in data.items() if name not in ("distribution", "dropout_seed")} == {
        "obs": (2, 4, 3),
        "action": (2, 4, 2),
        **dict.fromkeys(("sample_log_prob", "value", "reward", "done", "terminated", "truncated"), (2, 4)),
        "next_value": (2, 4),
        "action_mean": (2, 4, 2),
        "action_std": (2, 4, 2),
    }
    np.testing.assert_array_equal(data["obs"][:, -1], last_obs)
    np.testing.assert_array_equal(data["value"][:, -1], rollout.next_value[-1])
    for name in data.keys() - {"obs", "value", "distribution"}:
        assert not data[name][:, -1].any(), name
    np.testing.assert_array_equal(data["reward"][:, :-1], rollout.reward.T)
    np.testing.assert_array_equal(data["done"][:, :-1], rollout.done.T)


def test_pr122_keeps_what_follows_a_step_under_next() -> None:
    rollout, last_obs = make_rollout(kind="normal")
    data = rollout_to_dict(rollout, "pr122", last_obs=last_obs)
    assert data["next"].keys() == {"observation", "reward", "done", "terminated", "truncated", "value"}
    assert data["sample_log_prob"].shape == data["next"]["reward"].shape == (2, 3, 1)
    goal = data["observation"]["goal"]
    np.testing.assert_array_equal(data["next"]["observation"]["goal"][:, :-1], goal[:, 1:])
    np.testing.assert_array_equal(data["next"]["observation"]["goal"][:, -1], last_obs["goal"])
    np.testing.assert_array_equal(data["loc"], np.swapaxes(rollout.distribution.mean, 0, 1))
    np.testing.assert_allclose(data["scale"], np.exp(np.swapaxes(rollout.distribution.log_std, 0, 1)), 1e-6)


def test_without_extras_only_embodichains_fields_remain() -> None:
    rollout, last_obs = make_rollout()
    head = rollout_to_dict(rollout, "head", last_obs=last_obs, extras=False)
    seed = rollout_to_dict(rollout, "seed", extras=False)
    assert head.keys() == {"obs", "action", "sample_log_prob", "value", "reward", "done", "terminated", "truncated"}
    assert seed.keys() == {"obs", "actions", "rewards", "dones", "values", "logprobs"}


def test_what_embodichain_did_not_store_is_read_as_embodichain_reads_it() -> None:
    rollout, last_obs = make_rollout()
    head, _ = rollout_from_dict(rollout_to_dict(rollout, "head", last_obs=last_obs, extras=False), "head")
    np.testing.assert_array_equal(head.next_value[:-1], rollout.value[1:])  # also of reset observations
    np.testing.assert_array_equal(head.next_value[-1], rollout.next_value[-1])
    seed, _ = rollout_from_dict(rollout_to_dict(rollout, "seed", extras=False), "seed")
    np.testing.assert_array_equal(seed.next_value[:-1], rollout.value[1:])
    assert not seed.next_value[-1].any()
    np.testing.assert_array_equal(seed.terminated, rollout.done)
    assert not seed.truncated.any()


def test_action_moments_of_embodichain_become_the_distribution() -> None:
    rollout, last_obs = make_rollout(kind="normal")
    data = rollout_to_dict(rollout, "head", last_obs=last_obs)
    del data["distribution"]
    back, _ = rollout_from_dict(data, "head")
    assert back.extras == {} and back.dropout_seed is not None
    np.testing.assert_array_equal(back.distribution.mean, rollout.distribution.mean)
    np.testing.assert_allclose(back.distribution.log_std, rollout.distribution.log_std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_have_each_layouts_names_and_come_back(layout: Any) -> None:
    rollout, last_obs = make_rollout()
    steps = (rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated)
    advantage, target = gae(*steps, gamma=0.9, gae_lambda=0.8)
    rollout = rollout.replace(extras={"advantage": advantage, "value_target": target, "own": advantage[..., None]})
    td = rollout_to_tensordict(rollout, layout, last_obs=last_obs)
    data = rollout_to_dict(rollout, layout, last_obs=last_obs, extras=False)
    padding = np.zeros((2, 1), np.float32)
    expected = {
        "head": lambda x: np.concatenate([x.T, padding], axis=1),  # as EmbodiChain's compute_gae writes it
        "pr122": lambda x: x.T[..., None],
        "seed": lambda x: x,
    }[layout]
    names = {
        "head": {"advantage": advantage, "return": target},
        "pr122": {"advantage": advantage, "value_target": target, "return": target},
        "seed": {"advantages": advantage, "returns": target},
    }[layout]
    for name, x in names.items():
        np.testing.assert_array_equal(data[name], expected(np.asarray(x)))
        assert torch.equal(td[name], torch.tensor(data[name]))
    made = {"advantage", "value_target", "return", "advantages", "returns"}
    assert made & set(td.keys()) == made & data.keys() == names.keys() and "own" not in data
    back, _ = rollout_from_tensordict(td, layout)
    assert_same(back, rollout)


def test_a_return_without_a_value_target_is_one() -> None:
    rollout, last_obs = make_rollout()
    data = rollout_to_dict(rollout, "pr122", last_obs=last_obs)
    data["return"] = np.swapaxes(np.asarray(rollout.reward), 0, 1)[..., None]  # as the pull request's documents have it
    back, _ = rollout_from_dict(data, "pr122")
    assert back.extras.keys() == {"value_target"}
    np.testing.assert_array_equal(back.extras["value_target"], rollout.reward)
    taken = rollout.replace(extras={"value_target": rollout.reward, "return": rollout.reward})
    refused(rollout_to_dict, taken, "head", last_obs=last_obs, word="extras return are named like fields")


def test_a_critics_own_observation_stands_beside_the_actors() -> None:
    rollout, last_obs = make_rollout(shapes=OBS_SHAPES[2])
    data = rollout_to_dict(rollout, "head", last_obs=last_obs)
    assert data["obs"].shape == (2, 4, 3)
    assert data["critic_obs"].shape == (2, 4, 5)
    np.testing.assert_array_equal(data["critic_obs"][:, -1], last_obs["critic_obs"])


def test_copies_leave_the_jax_arrays_alone() -> None:
    for layout in LAYOUTS:
        rollout, last_obs = make_rollout(kind="normal")
        before = jax.tree.map(lambda x: np.array(x), (rollout, last_obs))
        td = rollout_to_tensordict(rollout, layout, last_obs=last_obs)
        td.apply_(lambda x: x.fill_(1))
        for x in jax.tree.leaves(rollout_to_dict(rollout, layout, last_obs=last_obs)):
            x.fill(1)
        assert_same((rollout, last_obs), before)
        arrays = rollout_from_tensordict(td, layout)
        before = jax.tree.map(lambda x: np.array(x), arrays)
        td.apply_(lambda x: x.zero_())
        assert_same(arrays, before)


def test_without_copy_memory_is_shared() -> None:
    rollout, last_obs = make_rollout(num_steps=16, num_envs=16, shapes=(32,))
    seed = rollout_to_tensordict(rollout, "seed", copy=False)
    pr122 = rollout_to_tensordict(rollout, "pr122", last_obs=last_obs, copy=False)
    place = rollout.obs.unsafe_buffer_pointer()
    assert seed["obs"].data_ptr() == pr122["observation"].data_ptr() == place
    assert rollout_to_tensordict(rollout, "seed")["obs"].data_ptr() != place
    back, _ = rollout_from_tensordict(pr122, "pr122", copy=False)
    assert back.obs.unsafe_buffer_pointer() == place


def test_arrays_on_several_devices_are_gathered() -> None:
    rollout, _ = make_rollout(num_envs=4)
    mesh = jax.make_mesh((4,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "envs"))
    sharded = jax.tree.map(lambda x: jax.device_put(x, spread), rollout)
    assert_same(rollout_from_tensordict(rollout_to_tensordict(sharded, "seed"), "seed")[0], rollout)


def test_mistakes_are_named() -> None:
    rollout, last_obs = make_rollout()
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), last_obs)
    unlike = rollout.replace(extras={"step": jnp.float32(3.0)})
    for wrong, layout, last, message in (
        (unlike, "head", last_obs, r"extras\['step'\] has shape \[\] .*, but reward has \[3, 2\]"),
        (rollout, "head", last_obs["goal"], "last_obs is not like obs"),
        (rollout, "pr122", wide, r"like one of obs: float32\[2, 2\], got float64\[2, 2\]"),
        (jax.tree.map(lambda x: x[:0], rollout), "head", last_obs, r"with T >= 1, got \[0, 2\]"),
    ):
        refused(rollout_to_dict, wrong, layout, last_obs=last, match=message)
    refused(rollout_to_dict, rollout, "ned", word="no layout 'ned'; there is head, pr122, seed")
    for layout in ("head", "pr122"):
        refused(rollout_to_dict, rollout, layout, word="pass last_obs")
    with pytest.raises(ValueError, match="extras reward are named like fields"):
        rollout_to_dict(rollout.replace(extras={"reward": rollout.reward}), "head", last_obs=last_obs)
    data = rollout_to_dict(rollout, "pr122", last_obs=last_obs)
    refused(rollout_from_dict, data, "head", word="layout head: it lacks obs, reward, done")
    del data["next"]["value"]
    refused(rollout_from_dict, data, "pr122", word="pr122, under next: it lacks value")


@cases(
    "layout field change message",
    ("head", "reward", lambda x: x[:, :-1], r"obs\['goal'\] has shape \[3, 2, 2\].* reward has \[2, 2\]"),
    ("seed", "values", lambda x: x[:, :1], r"value has shape \[3, 1\] .*, but reward has \[3, 2\]"),
    ("pr122", "value", lambda x: x[..., 0], r"value has shape \[3\] .*, but reward has \[3, 2\]"),
)
def test_fields_of_different_batches_are_refused(layout: str, field: str, change: Callable, message: str) -> None:
    rollout, last_obs = make_rollout()
    data = rollout_to_dict(rollout, layout, last_obs=last_obs)
    data[field] = change(data[field])
    refused(rollout_from_dict, data, layout, match=message)
    tensors = jax.tree.map(torch.from_numpy, data)
    refused(rollout_from_tensordict, tensors, layout, match=message)


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_of_any_strides_and_with_gradients_come_over_as_they_are(copy: bool) -> None:
    rollout, last_obs = make_rollout()
    td = rollout_to_tensordict(rollout, "seed", last_obs=last_obs)
    numbers = torch.randn(3, 2, 2, dtype=torch.complex64).conj().imag  # its sign is kept apart
    td["values"] = torch.randn(3, 1).expand(3, 2)
    td["rewards"] = torch.randn(2, 6, requires_grad=True)[:, ::2].T
    td["actions"] = numbers
    for data in (td, td.to_dict()):
        back, _ = rollout_from_tensordict(data, "seed", copy=copy)
        np.testing.assert_array_equal(back.value, td["values"].numpy())
        np.testing.assert_array_equal(back.reward, td["rewards"].detach().numpy())
        np.testing.assert_array_equal(back.action, numbers.resolve_neg().numpy())


def test_integers_of_64_bits_are_not_cut_silently() -> None:
    rollout, last_obs = make_rollout()
    td = rollout_to_tensordict(rollout, "seed", last_obs=last_obs)
    for dtype, number in ((torch.int64, -(2**31)), (torch.uint64, 2**32 - 1)):
        td["actions"] = torch.tensor(number, dtype=dtype).expand(3, 2)
        assert int(rollout_from_tensordict(td, "seed")[0].action[0, 0]) == number
    for dtype, number in ((torch.int64, 2**31), (torch.uint64, 2**63 + 1)):
        td["actions"] = torch.tensor(number, dtype=dtype).expand(3, 2)
        refused(rollout_from_tensordict, td, "seed", word="32 bits do not hold")
        with jax.enable_x64(True):
            assert int(rollout_from_tensordict(td, "seed")[0].action[0, 0]) == number


def test_numpy_arrays_of_bfloat16_become_tensors() -> None:
    rollout, last_obs = jax.tree.map(np.asarray, make_rollout(dtype="bfloat16"))
    td = rollout_to_tensordict(rollout, "head", last_obs=last_obs)
    assert td["obs", "goal"].dtype == torch.bfloat16


def test_arrays_in_an_observation_count_as_tensors() -> None:
    array = jnp.arange(4.0)
    tree = {"b": array, "a": {"numpy": np.full((4, 2), 2.0, np.float32)}, "name": "no array"}
    flat = torch.tensor([[2.0, 2.0, i] for i in range(4)])
    assert torch.equal(flatten_dict_observation(tree), flat)
    td = dict_to_tensordict({name: tree[name] for name in ("a", "b")}, "cpu")
    assert torch.equal(flatten_dict_observation(td), flat)
    td["b"].zero_()
    np.testing.assert_array_equal(array, np.arange(4.0))
    with pytest.raises(ValueError, match=r"of one N, got \[\[4, 1\], \[3, 2\]\]"):
        flatten_dict_observation({"a": torch.zeros(4, 1), "b": torch.zeros(3, 2)})


def test_an_observation_is_flattened_with_sorted_keys() -> None:
    tree = {"b": torch.ones(2, 1), "a": {"z": torch.full((2, 2, 2), 2.0), "y": torch.full((2, 1), 3.0)}}
    expected = torch.tensor([[3.0, 2.0, 2.0, 2.0, 2.0, 1.0]] * 2)
    for obs in (tree, dict_to_tensordict(tree, "cpu")):
        assert torch.equal(flatten_dict_observation(obs), expected)
    refused(flatten_dict_observation, dict_to_tensordict({}, "cpu"), word="no tensor")


def test_observations_become_tensordicts_as_in_embodichain() -> None:
    td = dict_to_tensordict({"robot": {"qpos": torch.zeros(4, 3)}}, "cpu")
    assert td["robot", "qpos"].shape == (4, 3)
    assert td.device == torch.device("cpu")
    assert dict_to_tensordict(td, "cpu")["robot", "qpos"] is td["robot", "qpos"]
    assert dict_to_tensordict(torch.zeros(4, 3), "cpu").batch_size == (4,)
    assert dict_to_tensordict(torch.zeros(3), "cpu").batch_size == ()
    assert dict_to_tensordict(torch.zeros(3), "cpu")["obs"].shape == (3,)
    for key in (None, "observation"):
        refused(dict_to_tensordict, [1.0], "cpu", key, word="got list")


def test_the_pull_requests_observations_are_under_one_outer_key() -> None:
    qpos = torch.zeros(4, 3)
    plain = dict_to_tensordict({"robot": {"qpos": qpos}}, "cpu")  # its batch size is []
    for obs in ({"robot": {"qpos": qpos}}, plain, {"robot": plain["robot"]}):
        td = dict_to_tensordict(obs, "cpu", key="observation")
        assert td.batch_size == td["observation", "robot"].batch_size == (4,)
        assert set(td.keys()) == {"observation"} and torch.equal(td["observation", "robot", "qpos"], qpos)
    assert plain.batch_size == ()
    td = dict_to_tensordict(np.zeros((4, 3), np.float32), "cpu", key="observation")
    assert td["observation"].shape == (4, 3) and td.batch_size == (4,)
    with pytest.raises(ValueError, match=r"of one N, got \[\[4, 3\], \[3, 1\]\]"):
        dict_to_tensordict({"a": qpos, "b": torch.zeros(3, 1)}, "cpu", key="observation")


def odd_fields() -> dict[str, Any]:
    """Make what no field of a rollout, and no array of an observation, can be, by kind."""
    sparse = torch.eye(2).to_sparse()
    return {
        "sparse": sparse,
        "nested": torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "meta": torch.zeros(2, 2, device="meta"),
        "complex": torch.zeros(2, 2, dtype=torch.complex64),
        "NonTensorData": tensordict.NonTensorData("text", batch_size=[2]),
        "objects": np.array([[None]]),
        "text": "text",
        "None": None,
        "ragged": [[1.0], [2.0, 3.0]],
        "flat": np.zeros(3, np.float32),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["head", "pr122", "seed"])
def test_fields_that_are_no_dense_numbers_are_named(layout: str) -> None:
    rollout, last_obs = make_rollout()
    data = rollout_to_dict(rollout, layout, last_obs=last_obs)
    for kind, odd in odd_fields().items():
        for read in (rollout_from_tensordict, rollout_from_dict):
            if (kind, read) != ("complex", rollout_from_dict):  # numbers to NumPy
                with pytest.raises(ValueError, match=r"'odd\.field' must be an? (dense tensor|array) of numbers"):
                    read({**data, "odd": {"field": odd}}, layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_arrays_of_an_observation_that_are_no_dense_numbers_are_refused() -> None:
    good = torch.zeros(2, 3)
    for kind in ("sparse", "nested", "meta", "complex", "objects"):
        obs = {"good": good, "odd": {"field": odd_fields()[kind]}}
        for convert in (flatten_dict_observation, lambda obs: dict_to_tensordict(obs, "cpu")):
            refused(convert, obs, match=r"obs\.odd\.field must be an? (dense tensor|array) of numbers")
    with pytest.raises(
        ValueError, match=r"must be dense, of real numbers; it holds a sparse_coo tensor float32\[2, 2\]"
    ):
        flatten_dict_observation(tensordict.TensorDict({"good": good, "odd": odd_fields()["sparse"]}, batch_size=[2]))
    passed_over = {"good": good, "text": odd_fields()["NonTensorData"]}
    assert flatten_dict_observation(passed_over).shape == (2, 3)
