"""Environments of other libraries: the library's own numbers, and who ended an episode."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax.config import parse_config
from ejax.envs.adapters import brax, envpool, gymnax, library
from ejax.envs.mujoco.choice import how_to_install
from ejax.rollout import reset, step
from ejax.run import train
from ejax.training.environments import make_env
from ejax.types import Timestep


def needs(module: str, extra: str) -> Callable[[Any], Any]:
    """Skip without the library; JAX's and Python's strictness is for our code, not for the library's."""
    marks = [
        pytest.mark.skipif(find_spec(module) is None, reason=f"{extra} is not there: pip install -e '.[{extra}]'"),
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.usefixtures("lenient_rank_promotion"),
    ]
    return lambda test: reduce(lambda marked, mark: mark(marked), marks, test)


@pytest.fixture
def lenient_rank_promotion() -> Any:
    with jax.numpy_rank_promotion("allow"):
        yield


with_gymnax = needs("gymnax", "gymnax")
with_brax = needs("brax", "brax")
with_playground = needs("mujoco_playground", "playground")


@pytest.mark.parametrize("family", ["gymnax", "brax", "playground", "envpool"])
def test_a_missing_library_says_what_to_install(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(library.importlib, "import_module", not_there)
    make = {
        "gymnax": gymnax.make,
        "brax": brax.make,
        "playground": brax.make_playground,
        "envpool": partial(envpool.make, num_envs=1),
    }[family]
    refused(make, "CartPole-v1", match=rf"pip install -e '\.\[{family}\]'", error=ModuleNotFoundError)


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match="zoo has no environment 'cartpole'; nearest: CartPole-v1"):
        library.check_name("zoo", "cartpole", ["CartPole-v1", "Pong"])
    refused(library.check_name, "zoo", "xyzzyx", ["Pong", "CartPole-v1"], match="there is: CartPole-v1, Pong")
    library.check_name("zoo", "Pong", ["Pong"])


def test_observations_become_float32_vectors_and_dicts_stay_dicts() -> None:
    obs = {
        "image": jnp.arange(12, dtype=jnp.uint8).reshape(2, 2, 3),
        "scalar": jnp.int32(3),
        "robot": {"q": jnp.ones(4)},
    }
    vectors = library.as_vectors(obs)
    assert jax.tree.map(jnp.shape, vectors) == {"image": (12,), "scalar": (1,), "robot": {"q": (4,)}}
    assert vectors["image"].tolist() == list(range(12))
    space = brax.vector_space(obs)
    assert isinstance(space, gymnasium.spaces.Dict)
    assert space.contains(jax.tree.map(np.asarray, vectors))


def test_an_observation_that_is_no_mapping_of_arrays_is_refused() -> None:
    refused(brax.vector_space, (jnp.ones(2), jnp.ones(3)), match="arrays or mappings of them, got tuple")


def test_playground_refuses_another_impl_or_a_missing_one_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    monkeypatch.setitem(sys.modules, "warp", None)
    refused(brax.make_playground, "CartpoleBalance", impl="cpp", match="impl must be 'jax', 'c' or 'warp', got 'cpp'")
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[warp\]'"):
        brax.make_playground("CartpoleBalance", impl="warp")


@cases(
    "module name options message",
    ("gymnax", "gymnax:CartPol-v1", {}, "gymnax has no environment 'CartPol-v1'; nearest: CartPole-v1"),
    ("gymnax", "gymnax:CartPole-v1", {"gravty": 1.0}, r"no parameter gravty; it has .*gravity"),
    ("brax", "brax:inverted_pendlum", {}, "no environment 'inverted_pendlum'; nearest: inverted_pendulum"),
    ("mujoco_playground", "playground:CartpolBalance", {}, "nearest: CartpoleBalance"),
    (
        "mujoco_playground",
        "playground:CartpoleBalance",
        {"vision_config": {"foo": 1}},
        r"has no config entry vision_config\.foo; it has .*ctrl_dt",
    ),
    ("envpool", "envpool:CartPole-v9", {}, "envpool has no environment 'CartPole-v9'; nearest: CartPole"),
    ("envpool", "envpool:CartPole-v1", {"nonsense": 3}, r"refuses the options of 'CartPole-v1'.*nonsense"),
)
@pytest.mark.filterwarnings("ignore")
def test_unknown_names_and_options_are_refused(module: str, name: str, options: dict[str, Any], message: str) -> None:
    pytest.importorskip(module)
    refused(make_env, name, options, num_envs=1, match=message)


@pytest.mark.slow
@with_gymnax
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_gymnax_trajectories_are_those_of_the_library(name: str) -> None:
    import gymnax as library

    env = gymnax.make(name)
    theirs, params = library.make(name)
    key = jax.random.key(3)
    state, obs = env.reset(key)
    their_obs, their_state = theirs.reset_env(key, params)
    np.testing.assert_array_equal(obs, their_obs)
    assert env.observation_space.contains(np.asarray(obs))
    for t in range(30):  # not jitted: two programs may round differently
        key_action, key_step = jax.random.split(jax.random.fold_in(key, t))
        action = theirs.action_space(params).sample(key_action)
        state, timestep = env.step(state, action, key_step)
        their_obs, their_state, reward, terminated, _ = theirs.step_env(key_step, their_state, action, params)
        np.testing.assert_array_equal(timestep.obs, their_obs)
        assert timestep.reward == reward
        assert timestep.terminated == terminated
        assert timestep.reward.dtype == jnp.float32


@with_gymnax
def test_gymnax_failure_terminates_and_is_not_a_truncation() -> None:
    env = gymnax.make("CartPole-v1")
    state, _ = env.reset(jax.random.key(0))
    act = jax.jit(env.step)
    for _ in range(20):  # pushed right without pause, the pole falls after about ten steps
        state, timestep = act(state, jnp.int32(1), jax.random.key(0))
        if timestep.terminated:
            break
    assert abs(float(timestep.obs[2])) > 12 * 2 * np.pi / 360
    assert not timestep.truncated


@with_gymnax
def test_gymnax_time_limit_truncates_and_does_not_terminate() -> None:
    env = gymnax.make("Pendulum-v1", max_episode_steps=4)
    assert env.max_episode_steps == 4
    state, _ = env.reset(jax.random.key(0))
    flags = []
    for _ in range(4):
        state, timestep = env.step(state, jnp.zeros(1), jax.random.key(0))
        flags.append((bool(timestep.terminated), bool(timestep.truncated)))
    assert flags == [(False, False)] * 3 + [(False, True)]


@pytest.mark.slow
@with_gymnax
def test_final_obs_is_the_observation_before_the_reset() -> None:
    env = gymnax.make("CartPole-v1", max_episode_steps=2)
    carry = reset(env, jax.random.key(1), 3)
    action = jnp.array([0, 1, 1])
    for t in range(2):
        state, key = carry.state, jax.random.key(t)
        carry, timestep = step(env, carry, action, key)
        key_step, _ = jax.random.split(key)
        _, unreset = jax.vmap(env.step)(state, action, jax.random.split(key_step, 3))
        np.testing.assert_allclose(timestep.final_obs, unreset.obs, rtol=1e-6)
    assert timestep.truncated.all()
    assert not timestep.terminated.any()
    assert (jnp.abs(carry.obs) <= 0.05).all()  # CartPole starts there
    assert (carry.state.time == 0).all()


@with_gymnax
def test_gymnax_actions_are_clipped_to_the_bounds() -> None:
    env = gymnax.make("PointRobot-misc")  # ±0.1
    key = jax.random.key(0)
    state, _ = env.reset(key)
    refused(env.step, state, jnp.zeros(()), key, match="action of shape")
    for bound in (0.1, -0.1):
        _, far = env.step(state, jnp.full(2, 50.0 * bound), key)
        _, near = env.step(state, jnp.full(2, bound), key)
        np.testing.assert_array_equal(far.obs, near.obs)


@with_gymnax
def test_gymnax_grids_are_flattened_and_discrete_observations_one_hot() -> None:
    env = gymnax.make("DeepSea-bsuite")
    _, obs = env.reset(jax.random.key(0))
    assert obs.shape == env.observation_space.shape == (64,)
    env = gymnax.make("FrozenLake-misc")
    _, obs = env.reset(jax.random.key(0))
    assert obs.shape == env.observation_space.shape == (16,)
    assert obs.sum() == 1.0


@with_gymnax
def test_gymnax_environments_of_equal_options_are_equal_and_hash_alike() -> None:
    a, b = gymnax.make("CartPole-v1", gravity=9.0), gymnax.make("CartPole-v1", gravity=9.0)
    assert a == b and hash(a) == hash(b)  # two jitted calls share one program
    assert a != gymnax.make("CartPole-v1")


@pytest.mark.slow
@with_gymnax
def test_gradients_pass_through_a_gymnax_transition_if_asked() -> None:
    def speed(action: jax.Array, env: gymnax.GymnaxEnv) -> jax.Array:
        state, _ = env.reset(jax.random.key(0))
        return env.step(state, action, jax.random.key(0))[1].obs[2]

    # d(speed)/d(torque) = 3·dt / (m·l²) = 3 · 0.05
    assert jax.grad(speed)(jnp.zeros(1), gymnax.make("Pendulum-v1", differentiable=True)) == pytest.approx(0.15)
    assert jax.grad(speed)(jnp.zeros(1), gymnax.make("Pendulum-v1")) == 0.0


@pytest.mark.slow
@with_gymnax
def test_ppo_updates_on_a_discrete_gymnax_environment(tmp_path: Path) -> None:
    metrics = train(parse_config(tiny(tmp_path, "gymnax:CartPole-v1", iterations=1))).last_train_metrics
    assert metrics["train/skipped_minibatches"] == 0.0 and metrics["train/grad_norm"] > 0.0


@with_brax
def test_brax_rewards_repeat_and_time_limit_are_counted_here() -> None:
    env = brax.make("fast", max_episode_steps=3, action_repeat=2)
    state, obs = env.reset(jax.random.key(0))
    assert obs.shape == env.observation_space.shape == (2,)
    truncated, position, velocity = [], 0.0, 0.0
    for _ in range(3):
        state, timestep = env.step(state, jnp.ones(1), jax.random.key(0))
        reward = 0.0
        for _ in range(2):  # v ← v + dt, p ← p + v·dt, r = p, with dt = 0.02
            velocity += 0.02
            position += velocity * 0.02
            reward += position
        assert timestep.reward == pytest.approx(reward)
        assert not timestep.terminated
        truncated.append(bool(timestep.truncated))
    assert truncated == [False, False, True]


@with_brax
def test_brax_dict_observations_stay_dicts_of_vectors() -> None:
    env = brax.make("fast", obs_mode="dict_pixels_state")
    _, obs = env.reset(jax.random.key(0))
    assert jax.tree.map(jnp.shape, obs) == {"state": (2,), "pixels/view_0": (48,), "pixels/view_1": (48,)}


@with_brax
@pytest.mark.slow
def test_a_fallen_brax_pendulum_terminates_and_starts_again() -> None:
    env = brax.make("inverted_pendulum")
    carry = reset(env, jax.random.key(0), 2)
    act = jax.jit(lambda carry, key: step(env, carry, jnp.ones((2, 1)), key))
    for t in range(50):
        carry, timestep = act(carry, jax.random.key(t))
        if timestep.terminated.all():
            break
    assert (jnp.abs(timestep.final_obs[:, 1]) > 0.2).all()  # rad: Brax's limit
    assert (jnp.abs(carry.obs) <= 0.01).all()  # where it starts
    assert not timestep.truncated.any()
    assert (carry.state.episode_step == 0).all()


@with_playground
def test_playground_environments_that_would_be_downloaded_fail_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "absent")
    monkeypatch.setattr(mjx_env.subprocess, "Popen", lambda *_, **__: pytest.fail("git was called"))
    with pytest.raises(FileNotFoundError, match="playground:Go1Getup needs the robot models of mujoco_menagerie"):
        brax.make_playground("Go1Getup")


@with_playground
@pytest.mark.slow
def test_playground_cartpole_steps_as_the_library_and_is_truncated() -> None:
    env = brax.make_playground("CartpoleBalance", max_episode_steps=3)
    key = jax.random.key(0)
    state, _ = env.reset(key)
    theirs = jax.jit(env.env.reset)(jax.random.key_data(key))
    our_step, their_step = jax.jit(env.step), jax.jit(env.env.step)
    for t in range(3):
        action = jnp.array([2.0 * t])  # out of range from the second step on
        state, timestep = our_step(state, action, key)
        theirs = their_step(theirs, jnp.clip(action, -1.0, 1.0))
        np.testing.assert_allclose(timestep.obs, theirs.obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(timestep.reward, theirs.reward, rtol=1e-5)
        assert bool(timestep.truncated) == (t == 2)
        assert not timestep.terminated
    assert {"upright", "centered", "small_control", "small_velocity"} <= timestep.info["rewards"].keys()


@with_playground
def test_playground_refuses_the_c_engine_outside_the_control_suite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path)
    refused(brax.make_playground, "Go1Getup", impl="c", match="playground:Go1Getup may: use 'jax' or 'warp'")


@with_playground
@pytest.mark.slow
def test_playground_on_the_c_engine_follows_mjx_and_breaks_as_it_does() -> None:
    """Measured: at most 3.3e-5 in WalkerRun's velocities, of about 10."""

    def play(impl: str) -> list[Timestep]:
        env = brax.make_playground("WalkerRun", impl=impl)
        advance, seen = jax.jit(jax.vmap(env.step, in_axes=(0, 0, None))), []
        state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 3))
        for t in range(4):
            action = jax.random.uniform(jax.random.key(t), (3, 6), minval=-1.0, maxval=1.0)
            state, timestep = advance(state, action.at[2].set(jnp.nan if t == 3 else 0.0), jax.random.key(0))
            seen.append(timestep)
        return seen

    for ours, theirs in zip(play("c"), play("jax"), strict=True):
        np.testing.assert_allclose(ours.obs, theirs.obs, atol=5e-4)
        np.testing.assert_allclose(ours.reward, theirs.reward, atol=1e-5)
        np.testing.assert_array_equal(ours.terminated, theirs.terminated)
    assert theirs.terminated.tolist() == [False, False, True]


@with_playground
@pytest.mark.slow
def test_playground_on_warp_follows_mjx_through_the_resets_of_single_rows() -> None:
    """Measured: at most 2.4e-7 over these steps. Nothing touches here."""
    if how := how_to_install("warp"):
        pytest.skip(f"MuJoCo Warp is not installed: {how}")

    def play(impl: str) -> list[Timestep]:
        env = brax.make_playground("CartpoleBalance", impl=impl, max_episode_steps=3)
        carry = jax.jit(lambda key: reset(env, key, 4))(jax.random.key(0))
        # of different ages, so that rows are reset one by one
        carry = replace(carry, state=carry.state.replace(episode_step=jnp.arange(4) % 3))
        advance, seen = jax.jit(lambda carry, key: step(env, carry, jnp.full((4, 1), 0.3), key)), []
        for t in range(5):
            carry, timestep = advance(carry, jax.random.key(t))
            seen.append(timestep)
        return seen

    warp, mjx = play("warp"), play("jax")
    assert len({bytes(np.asarray(each.truncated)) for each in warp}) > 1
    for ours, theirs in zip(warp, mjx, strict=True):
        np.testing.assert_allclose(ours.obs, theirs.obs, atol=1e-5)
        np.testing.assert_allclose(ours.reward, theirs.reward, atol=1e-5)
        np.testing.assert_array_equal(ours.truncated, theirs.truncated)
