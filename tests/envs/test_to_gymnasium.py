"""ejax's tasks as Gymnasium's environments."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refusals, refused
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import ejax.envs.gymnasium  # noqa: F401  # registers the ids
from ejax.envs.adapters.gymnasium import GymnasiumVector
from ejax.envs.adapters.to_gymnasium import EjaxEnv, EjaxVectorEnv
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.envs.tasks.push_cube import PushCubeRL
from ejax.envs.wrappers.placing import add_events
from ejax.schema.registry import ENVS

JUSTIFIED = ("-infinity", "infinity", "symmetric and normalized")
"""Words of the checker's warnings: positions have no bounds, and EmbodiChain's actions are Δq within ±0.5 rad."""
STAY = np.zeros(2, np.float32)
SPREAD = ((-0.1, -0.1, 0.0), (0.1, 0.1, 0.0))


def test_ids_are_there_without_jax() -> None:
    found = "'jax' in sys.modules, 'ejax/PushCube-v0' in gymnasium.registry"
    code = f"import sys, gymnasium, ejax.envs.gymnasium; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("name", ENVS)
def test_every_registered_task_has_an_id(name: str) -> None:
    short = name if name == "PushCubeRL" else name.removesuffix("RL")  # PushCube is another task
    spec = gymnasium.spec(f"ejax/{short}-v0")
    assert spec.kwargs == {"task": name} and spec.vector_entry_point


C_ENGINE = {"physics": "mujoco"}
CHECKED = {"PointMass": {}, "PushCube": {**C_ENGINE, "sim_steps_per_control": 1}}
RARELY: dict[str, dict[str, str]] = {
    **dict.fromkeys(("CartPole", "PickPlace", "Velocity", "InstructedPlace"), C_ENGINE),
    "PlanarReach": {},
}


@pytest.mark.slow_cases(*RARELY)
@pytest.mark.parametrize("name", [*CHECKED, *RARELY])
def test_gymnasiums_checker_passes(name: str) -> None:
    env = gymnasium.make(f"ejax/{name}-v0", **(CHECKED | RARELY)[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env.unwrapped)
    assert not [each for each in caught if not any(text in str(each.message) for text in JUSTIFIED)]


def test_a_seeded_reset_is_that_of_its_key() -> None:
    env = gymnasium.make("ejax/PushCubeRL-v0", physics="mujoco", cube_position_range=SPREAD)
    task = PushCubeRL(physics="mujoco", cube_position_range=SPREAD)
    for seed in (0, 7):
        obs, info = env.reset(seed=seed)
        np.testing.assert_array_equal(obs, jax.jit(task.reset)(jax.random.key(seed))[1])
        assert obs.dtype == np.float32 and obs.flags.writeable and info == {}


def test_a_step_gives_plain_numbers_and_the_terms() -> None:
    env = gymnasium.make("ejax/PushCubeRL-v0", physics="mujoco", success_threshold=5.0)
    env.reset(seed=0)
    obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert (type(reward), terminated, truncated) == (float, True, False) and obs in env.observation_space
    assert info["success"] and info["metrics"].keys() == {"distance_to_goal"}
    assert sum(info["rewards"].values()) == pytest.approx(reward, rel=1e-6)


@pytest.mark.slow
def test_rows_take_the_course_of_single_environments() -> None:
    """Past their ends: final_obs is the last observation, and the next episode the one that reset() begins."""
    num_envs, limit = 3, 4
    vector = gymnasium.make_vec("ejax/PointMass-v0", num_envs=num_envs, max_episode_steps=limit)
    assert vector.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    singles = [EjaxEnv("PointMassRL", episode_length=limit) for _ in range(num_envs)]
    obs, _ = vector.reset(seed=5)
    for row, env in enumerate(singles):
        np.testing.assert_allclose(obs[row], env.reset(seed=5 + row)[0], atol=1e-6)
    for step in range(2 * limit):
        action = np.full((num_envs, 2), 0.1 * step, np.float32)
        obs, reward, terminated, truncated, info = vector.step(action)
        for row, env in enumerate(singles):
            last, *alone, own = env.step(action[row])
            assert alone == [pytest.approx(reward[row], abs=1e-5), terminated[row], truncated[row]]
            ended = alone[1] or alone[2]
            of_row = info["final_info"] if ended else info
            assert of_row["success"][row] == own["success"] and of_row["_success"][row]
            assert of_row["metrics"]["path_length"][row] == pytest.approx(own["metrics"]["path_length"], abs=1e-5)
            if ended:
                np.testing.assert_allclose(info["final_obs"][row], last, atol=1e-5)
                assert not info["_success"][row]
            np.testing.assert_allclose(obs[row], env.reset()[0] if ended else last, atol=1e-5)
        assert ("final_obs" in info) == (step % limit == limit - 1)


def test_a_mask_resets_some_rows_and_the_others_go_on() -> None:
    vector = EjaxVectorEnv(PointMassRL(), 3)
    vector.reset(seed=0)
    before = vector.step(np.ones((3, 2)))[0]
    obs, _ = vector.reset(seed=[9, None, None], options={"reset_mask": np.array([True, False, False])})
    np.testing.assert_array_equal(obs[1:], before[1:])
    np.testing.assert_array_equal(obs[0], EjaxEnv(PointMassRL()).reset(seed=9)[0])


@pytest.mark.slow
def test_what_lasts_lasts_over_episodes() -> None:
    """``startup``: the mass of a row is drawn once, and kept by the next reset()."""
    mass = {"func": "randomize_rigid_object_mass", "mode": "startup"}
    mass["params"] = {"entity_cfg": {"uid": "cube"}, "mass_range": [1.0, 3.0]}
    env = EjaxEnv(add_events(PushCubeRL(physics="mujoco", episode_length=1), {"mass": mass}))
    masses = []
    for seed in (0, None, None, 1):
        env.reset(seed=seed)
        masses.append(float(env._rows.state.env.physics.parameters["body_mass"].sum()))
        env.step(np.zeros(6))
    assert masses[0] == masses[1] == masses[2] != masses[3]


@pytest.mark.slow
def test_observations_that_are_dicts_and_pictures() -> None:
    cfg = {"env": "PushCubeRL", "env_cfg": {"physics": "mujoco"}, "renderer": "raycast", "width": 8, "height": 6}
    vector = gymnasium.make_vec("ejax/RenderedEnv-v0", num_envs=2, **cfg)
    obs, _ = vector.reset(seed=0)
    assert obs in vector.observation_space and obs["image"].shape == (2, 6, 8, 3)
    assert obs["image"].dtype == np.uint8 and obs["state"].dtype == np.float32


@pytest.mark.slow
def test_it_draws_what_can_be_drawn() -> None:
    env = gymnasium.make("ejax/PushCubeRL-v0", physics="mujoco", render_mode="rgb_array")
    assert env.metadata["render_fps"] == 25
    env.reset(seed=0)
    picture: Any = env.render()
    assert picture.shape == (480, 640, 3) and picture.dtype == np.uint8 and picture.std() > 10
    vector = EjaxVectorEnv("PushCubeRL", 2, "rgb_array", physics="mujoco")
    assert vector.render() is None
    vector.reset(seed=0)
    np.testing.assert_array_equal((vector.render() or ())[0], picture)


def test_ejax_takes_its_own_vector_back() -> None:
    """By the adapter for Gymnasium's vectors: final observations and success arrive."""
    host = GymnasiumVector(EjaxVectorEnv("PointMassRL", 2, episode_length=1, success_threshold=10.0))
    first = host.reset(np.zeros(2, np.uint32))
    step = host.step(np.zeros((2, 2), np.float32))
    assert step.terminated.all() and step.info["success"].tolist() == [1.0, 1.0]
    np.testing.assert_allclose(step.final_obs[:, :2], first[:, :2])
    assert not np.array_equal(step.obs, step.final_obs)


@refusals(
    (lambda: EjaxEnv("PointMassRL", masss=2.0), "PointMassRL takes no masss", "Did you mean 'mass'"),
    (
        lambda: EjaxEnv("PointMassRL", episode_length=1, max_episode_steps=2),
        "episode_length",
        "mean the same; keep one",
    ),
    (lambda: EjaxEnv("PointMassRL", mass=0.0), "PointMassRL", "mass must be > 0"),
    (lambda: EjaxEnv("PointMasRL"), "no env 'PointMasRL'", "Did you mean 'PointMassRL'"),
    (lambda: EjaxEnv("EmbodiedEnv"), "EmbodiedEnv", "gym_config"),
    (lambda: EjaxEnv("RenderedEnv", blank=True), "RenderedEnv", "pass env"),
    (lambda: EjaxEnv(PointMassRL(), mass=1.0), "arguments (mass)", "PointMassRL is made already"),
    (lambda: EjaxEnv("PointMassRL", render_mode="rgb_array"), "render_mode", "PointMassRL cannot be drawn"),
    (lambda: EjaxEnv("gymnasium:CartPole-v1", num_envs=1), "gymnasium:CartPole-v1", "is already stepped outside JAX"),
    (lambda: EjaxVectorEnv("PointMassRL", 0), "num_envs", "must be an integer >= 1, got 0"),
    (lambda: EjaxEnv("PointMassRL").reset(options={"low": 0}), "reset takes no option 'low'", "there is none"),
    (lambda: EjaxEnv("PointMassRL").reset(seed=2**32), "seed", "got 4294967296; must be within"),
    (lambda: EjaxVectorEnv("PointMassRL", 2).reset(seed=[1]), "seed", "got 1 seeds"),
    (lambda: EjaxVectorEnv("PointMassRL", 2).reset(options={"reset_mask": [1, 0]}), "reset_mask", "must be bool [2]"),
)
def test_what_is_wrong_is_refused(given: Any, key: str, word: str) -> None:
    refused(given, key=key, word=word)


def test_a_step_needs_an_episode() -> None:
    env = EjaxEnv("PointMassRL", episode_length=1)
    refused(env.step, STAY, match="no episode has started", error=gymnasium.error.ResetNeeded)
    env.reset(seed=0)
    env.step(STAY)
    refused(env.step, STAY, match="the episode is over", error=gymnasium.error.ResetNeeded)
    vector = EjaxVectorEnv("PointMassRL", 2)
    refused(vector.step, jnp.zeros((2, 2)), match="no episode has started", error=gymnasium.error.ResetNeeded)
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"call reset\(\) without a mask"):
        vector.reset(options={"reset_mask": np.array([True, False])})


@pytest.mark.usefixtures("registered_names")
@cases("page title", ("host_envs.md", "## ejax's tasks for other libraries"), ("extend.md", "## A task under a name"))
def test_the_pages_code_runs_as_it_stands(page: str, title: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text.partition(title)[2].partition("\n## ")[0], re.M | re.S)
    exec(compile(block, page, "exec"), {"__name__": "page"})
