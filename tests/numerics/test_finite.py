"""Finite numbers: the tests for them, and that no environment takes others for a success."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from ejax.envs.adapters.brax import adapt
from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.tasks.cart_pole import CartPoleRL
from ejax.envs.tasks.instructed_place import InstructedPlaceRL
from ejax.envs.tasks.pick_place import PickPlaceRL
from ejax.envs.tasks.planar_reach import PlanarReachRL
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push import PushCube
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.numerics.finite import all_finite, finite_rows
from ejax.schema.registry import ENVS

KEY = jax.random.key(0)
BAD = (np.nan, np.inf, -np.inf)
FOLDER = Path(__file__).parents[1] / "gym_configs"


@pytest.mark.parametrize("bad", BAD)
def test_one_number_that_is_not_finite_is_found_wherever_it_is(bad: float) -> None:
    tree = {"a": jnp.ones((3, 2)), "b": (jnp.zeros(3, jnp.int32), jnp.ones((3,), jnp.float16)), "key": KEY}
    look = jax.jit(all_finite)
    assert look(tree) and look() and look({"n": jnp.arange(3)})
    for i in range(6):
        assert not look({**tree, "a": tree["a"].at[np.unravel_index(i, (3, 2))].set(bad)})
    assert not look({**tree, "b": (tree["b"][0], tree["b"][1].at[2].set(bad))})
    assert look({**tree, "a": jnp.full((3, 2), np.finfo(np.float32).max)})  # nothing overflows on the way


@pytest.mark.parametrize("numpy", [np, jnp])
def test_rows_are_looked_at_one_by_one(numpy: Any) -> None:
    picture = np.zeros((4, 2, 2), np.uint8)
    numbers = np.ones((4, 3), np.float32)
    numbers[1, 2] = np.nan
    reward = np.array([0.0, 0.0, 0.0, np.inf])
    rows = finite_rows({"image": picture, "numbers": numbers}, reward, numpy=numpy)
    assert np.asarray(rows).tolist() == [True, False, True, False]


def _at_rest(env: Any) -> Any:
    return env.reset(KEY)[0]


def _upright(env: CartPoleRL) -> Any:
    state = _at_rest(env)
    return replace(state, physics=replace(state.physics, qpos=jnp.zeros(2)), target=jnp.zeros(2))


def _upright_world(env: EmbodiedEnv) -> Any:
    state = _at_rest(env)
    return replace(state, physics=replace(state.physics, qpos=jnp.zeros(2)), episode_step=jnp.int32(10**6))


def _set_down(env: PickPlaceRL) -> Any:
    state = _at_rest(env)
    goal = jnp.asarray([-0.65, -0.3]) + jnp.zeros(2)
    return replace(
        state,
        physics=replace(state.physics, qpos=state.physics.qpos.at[8:10].set(goal)),
        goal=state.goal.at[:2].set(goal),
        was_lifted=jnp.ones((), bool),
    )


def _set_down_as_instructed(env: InstructedPlaceRL) -> Any:
    state = _at_rest(env)
    place = state.zones[state.target_zone]
    qpos = state.physics.qpos
    for cube, start in enumerate((8, 15)):
        qpos = qpos.at[start : start + 3].set(jnp.where(cube == state.target_cube, place, qpos[start : start + 3]))
    return replace(state, physics=replace(state.physics, qpos=qpos), was_lifted=jnp.ones(2, bool))


def _gym_config(name: str, **extensions: float) -> dict[str, Any]:
    config = json.loads((FOLDER / f"{name}.json").read_text())
    config["env"].setdefault("extensions", {}).update(extensions)
    return config


# an environment, and a state in which the next step is a success
SUCCESSES: dict[str, tuple[Any, Any]] = {
    "PointMassRL": (PointMassRL(success_threshold=10.0, success_bonus=1.0), _at_rest),
    "PlanarReachRL": (PlanarReachRL(success_threshold=10.0), _at_rest),
    "CartPoleRL": (CartPoleRL(max_episode_steps=1, physics="mujoco"), _upright),
    "PushCube": (PushCube(success_threshold=10.0, physics="mujoco"), _at_rest),
    "PushCubeRL": (PushCubeRL(success_threshold=10.0, physics="mujoco"), _at_rest),
    "PickPlaceRL": (PickPlaceRL(physics="mujoco"), _set_down),
    "InstructedPlaceRL": (InstructedPlaceRL(physics="mujoco"), _set_down_as_instructed),
    "EmbodiedEnv": (EmbodiedEnv(_gym_config("push_cube", success_threshold=10.0), physics="mujoco"), _at_rest),
    "EmbodiedEnv, a pole": (EmbodiedEnv(_gym_config("cart_pole"), physics="mujoco"), _upright_world),
}
GRIPPERS = {"PickPlaceRL", "InstructedPlaceRL"}


def test_every_registered_environment_is_here() -> None:
    without = {"VelocityRL", "TrackingRL"}  # have no success
    assert {name.split(",")[0] for name in SUCCESSES} | without == set(ENVS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUCCESSES)
def test_no_state_that_is_not_finite_is_a_success(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of the state and of the action, one at a time. Such an episode is over."""
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log where it is
    env, prepare = SUCCESSES[name]
    action = jnp.zeros(env.action_space.shape)
    healthy = (prepare(env), action.at[-1].set(-1.0) if name in GRIPPERS else action)  # which stay open
    step = jax.jit(jax.vmap(lambda state, action: env.step(state, action, KEY)))
    expected, timestep = step(*jax.tree.map(lambda x: x[None], healthy))
    assert timestep.info["success"].all() and timestep.terminated.all()

    leaves, treedef = jax.tree.flatten(healthy)
    cases = [(i, j, bad) for i, x in enumerate(leaves) if x.dtype == jnp.float32 for j in range(x.size) for bad in BAD]
    broken = [np.stack([np.array(x)] * len(cases)) for x in leaves]
    for row, (i, j, bad) in enumerate(cases):
        broken[i][row].reshape(-1)[j] = bad
    after, timestep = step(*treedef.unflatten(broken))

    finite = np.asarray(finite_rows(after))
    assert not np.asarray(timestep.info["success"])[~finite].any()
    assert not np.asarray(timestep.terminated)[~finite].any() and np.asarray(timestep.truncated)[~finite].all()
    same = finite_rows(
        jax.tree.map(lambda x, y: jnp.where(x == y, 0.0, jnp.nan), after, expected_rows(expected, after))
    )
    nan = np.isnan([bad for _, _, bad in cases])
    # what a step overwrites, such as the action before, may have been anything; infinities may be cut off
    assert (~finite | np.asarray(same))[nan].all() and not finite[nan].all()


def expected_rows(expected: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), expected, like)


@pytest.mark.slow
def test_a_simulation_that_breaks_is_nan_and_not_put_back_to_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start as the cart-pole's model does: upright, at rest, a success."""
    monkeypatch.chdir(tmp_path)
    env = CartPoleRL(max_episode_steps=1, physics="mujoco")
    state = env.reset(KEY)[0]
    rows = jax.tree.map(lambda x: jnp.stack([x] * 5), state)
    qvel = rows.physics.qvel.at[1, 1].set(1e11).at[3, 0].set(jnp.inf)  # of rows 1 and 3
    rows = replace(rows, physics=replace(rows.physics, qvel=qvel))
    action = jnp.zeros((5, 2)).at[4, 0].set(jnp.nan)
    after, timestep = jax.vmap(lambda state, action: env.step(state, action, KEY))(rows, action)
    assert np.isnan(after.physics.qpos).all(axis=1).tolist() == [False, True, False, True, True]
    assert not timestep.info["success"].any() and timestep.truncated.all()
    alone, _ = jax.vmap(lambda state, action: env.step(state, action, KEY))(
        jax.tree.map(lambda x: x[:1], rows), action[:1]
    )
    np.testing.assert_array_equal(np.asarray(after.physics.qpos)[[0, 2]], np.tile(alone.physics.qpos, (2, 1)))


@pytest.mark.slow
def test_brax_environments_are_not_believed_either() -> None:
    def reset(key: Any) -> Any:
        del key
        return Inner(obs=jnp.zeros(2), reward=jnp.zeros(()), done=jnp.zeros(()), metrics={"success": jnp.ones(())})

    def step(inner: Inner, action: Any) -> Inner:
        return inner.replace(obs=inner.obs + action)  # type: ignore[attr-defined]

    env = adapt("fake", SimpleNamespace(reset=reset, step=step, action_size=2), max_episode_steps=3, options={})
    state = env.reset(KEY)[0]
    assert env.step(state, jnp.ones(2), KEY)[1].info["success"]
    assert not env.step(state, jnp.array([0.0, jnp.nan]), KEY)[1].info["success"]


@struct.dataclass
class Inner:
    """A state as Brax has it."""

    obs: Any
    reward: Any
    done: Any
    metrics: Any
