"""Vector environments of torch: what crosses, what must not be overwritten, terminal observations, resets, errors."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from case_tables import cases, refused
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tiny import tiny

from ejax.collectors import HostCollector
from ejax.config import RunConfig, load_config, parse_config
from ejax.distributions import action_spec
from ejax.envs.host.guarded import GuardedEnv
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.policies import ActorCritic, NetworkConfig
from ejax.run import train
from ejax.schema.trust import trust, trust_strings
from ejax.training.environments import build_env
from ejax.types import HostEnv

export_run = pytest.importorskip("interop.export").export_run
torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
interop_envs = pytest.importorskip("interop.envs")
torch_tasks = pytest.importorskip("torch_tasks")

TorchVector, make = interop_envs.TorchVector, interop_envs.make
Counting, Nested = torch_tasks.Counting, torch_tasks.Nested
SEEDS = np.arange(3, dtype=np.uint32)
FILE = Path(torch_tasks.__file__)


def play(env: Any, num_steps: int) -> list[Any]:
    return [env.step(np.full((env.num_envs, 1), 0.25 * t, np.float32)) for t in range(num_steps)]


def started(inner: Any, **options: Any) -> Any:
    """Adapt an environment, and reset it."""
    env = TorchVector(inner, **options)
    env.reset(SEEDS)
    return env


def collected(inner: Any, num_steps: int, *keys: int) -> Any:
    """Collect rollouts with a small policy, one by each key; return the last."""
    network = NetworkConfig(hidden_sizes=(8,), activation="tanh")
    env = TorchVector(inner)
    policy = ActorCritic(action_spec(env.action_space), network, network)
    params = policy.init(jax.random.key(0), np.zeros((3, 4), np.float32))
    with HostCollector(policy, [env], num_steps=num_steps, seed=0) as collector:
        rollouts = [collector.collect(params, jax.random.key(key), index=i) for i, key in enumerate(keys)]
    return rollouts[-1].rollout


def config_for(place: str, **cfg: Any) -> dict[str, Any]:
    raw = tiny(env=f"torch:{place}", env_cfg=cfg, enable_eval=True, num_eval_envs=2, num_eval_episodes=4)
    return raw | {"algorithm": {"name": "ppo", "cfg": {"batch_size": 16, "n_epochs": 1}}}


def test_a_factory_is_named_by_its_module_or_by_its_file() -> None:
    for place in ("torch_tasks:Counting", f"{FILE}:Counting"):
        trust(place)
        env = make(place, num_envs=3, length=5)
        assert isinstance(env, HostEnv)
        assert (env.num_envs, env.env.length, env.observation_space.shape) == (3, 5, (4,))


@cases(
    "place message",
    ("PickCube-v1", "must be torch:package.module:factory or torch:FILE.py:factory"),
    ("torch_tasks:Count", "no 'Count'. Did you mean 'Counting'"),
    ("no_such_module:Env", "cannot be imported"),
    ("no/such/file.py:Env", "there is no file no/such/file.py"),
    (f"{FILE}:Count", "has no 'Count'"),
    ("types:SimpleNamespace", "a SimpleNamespace is not a vector environment"),
)
def test_a_place_without_an_environment_is_refused(place: str, message: str) -> None:
    trust_strings([place])
    refused(make, place, num_envs=2, match=message)


def test_observations_actions_and_flags_cross() -> None:
    env = TorchVector(Counting())
    obs = env.reset(SEEDS)
    np.testing.assert_array_equal(obs[:, :3], [[0, 0, 0], [1, 0, 0], [2, 0, 0]])
    first, second, third = play(env, 3)
    np.testing.assert_array_equal(second.obs[:, :3], [[0, 2, 0.25], [1, 2, 0.25], [2, 2, 0.25]])
    np.testing.assert_array_equal(first.reward, np.array([0.1, 1.1, 2.1], np.float32))
    np.testing.assert_array_equal(third.terminated, [True, False, False])
    np.testing.assert_array_equal(third.truncated, [True, True, True])
    np.testing.assert_array_equal(third.obs[:, 1:3], np.zeros((3, 2)))
    for array, dtype in ((third.obs, np.float32), (third.reward, np.float32), (third.terminated, np.bool_)):
        assert array.dtype == dtype


def test_an_environment_that_writes_over_its_observation_changes_nothing_that_was_given() -> None:
    played = []
    for copies in (False, True):
        env = TorchVector(Counting(copies=copies))
        played.append([env.reset(SEEDS), *play(env, 7)])
    chex.assert_trees_all_equal(*played)


def test_a_rollout_does_not_depend_on_whether_observations_are_written_over() -> None:
    rollouts = [collected(Counting(copies=copies), 7, 1, 2) for copies in (False, True)]
    np.testing.assert_array_equal(rollouts[0].obs[:, 0, 1], [1, 2, 0, 1, 2, 0, 1])
    chex.assert_trees_all_equal(*rollouts)


def test_an_action_that_the_environment_keeps_is_not_written_over() -> None:
    inner = Counting()
    env = started(inner)
    action = np.full((3, 1), 0.5, np.float32)
    env.step(action)
    action[:] = -1.0
    assert inner.actions[0].tolist() == [[0.5]] * 3


@pytest.mark.parametrize(("clip_actions", "expected"), [(True, 1.0), (False, 7.0)])
def test_actions_are_clipped_unless_told_not_to(clip_actions: bool, expected: float) -> None:
    inner = Counting()
    env = started(inner, clip_actions=clip_actions)
    env.step(np.full((3, 1), 7.0, np.float32))
    assert inner.actions[0].tolist() == [[expected]] * 3


@cases(
    "final key",
    ("final_obs", None),
    ("final_observation", None),
    ("terminal_observation", None),
    ("log.last", "log.last"),
)
def test_terminal_observations_are_the_environments_own(final: str, key: str | None) -> None:
    env = started(Counting(final=final), final_obs_key=key)
    *_, last = play(env, 3)
    np.testing.assert_array_equal(last.final_obs[:, 1:3], np.full((3, 2), (3.0, 0.5)))
    np.testing.assert_array_equal(last.obs[:, 1], np.zeros(3))
    assert env.reports() == []


def test_without_terminal_observations_the_one_before_the_step_stands_in_and_that_is_told_once() -> None:
    env = started(Counting())
    steps = play(env, 7)
    for t in (2, 5):
        np.testing.assert_array_equal(steps[t].final_obs, steps[t - 1].obs)
    for t in (0, 1, 3, 4, 6):
        np.testing.assert_array_equal(steps[t].final_obs, steps[t].obs)
    assert [text.split(" (")[0] for text in env.reports()] == ["Counting gives no terminal observations"]
    play(env, 3)
    assert env.reports() == []


def test_a_cut_off_episode_bootstraps_from_the_value_before_its_last_step() -> None:
    rollout = collected(Counting(), 4, 1)
    np.testing.assert_array_equal(rollout.truncated[:, 1], [False, False, True, False])
    np.testing.assert_allclose(rollout.next_value[2], rollout.value[2], rtol=1e-6)
    np.testing.assert_allclose(rollout.next_value[:2], rollout.value[1:3], rtol=1e-6)


def test_a_key_of_terminal_observations_that_is_not_there_is_an_error() -> None:
    env = started(Counting(), final_obs_key="final_obs")
    refused(play, env, 3, key="final_obs_key 'final_obs' is not in info", word="info has success, metrics")


@pytest.mark.parametrize("container", ["dict", "TensorDict"])
def test_nested_observations_become_vectors(container: str) -> None:
    inner = Nested(final="final_obs", copies=True)
    if container == "TensorDict":
        tensordict = pytest.importorskip("tensordict")
        as_dict = inner.observe
        inner.observe = lambda: tensordict.TensorDict({**as_dict(), "unseen": torch.zeros(3)}, batch_size=3)
    else:
        inner.final = None  # a dict has no clone
    env = TorchVector(inner)
    assert env.observation_space["policy"].shape == (2,)
    assert (env.observation_space["image"].shape, env.action_space.shape) == ((12,), (1,))
    env.reset(SEEDS)
    step, *_ = play(env, 1)
    assert step.obs.keys() == {"policy", "image"}
    np.testing.assert_array_equal(step.obs["policy"], [[0, 1], [1, 1], [2, 1]])
    np.testing.assert_array_equal(step.obs["image"], np.ones((3, 12), np.float32))


def test_success_metrics_and_rewards_are_carried_over() -> None:
    env = started(Counting())
    *_, last, after = play(env, 4)
    np.testing.assert_array_equal(last.info["success"], [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(last.info["metrics"]["count"], [3.0, 3.0, 3.0])
    assert last.info["metrics"]["pair"].shape == (3, 2)
    np.testing.assert_array_equal(after.info["metrics"]["count"], [1.0, 1.0, 1.0])
    assert jax.tree.structure(last.info) == jax.tree.structure(after.info)


def test_what_final_info_tells_of_rows_that_ended_wins_and_the_names_stay_the_same() -> None:
    inner = Counting()
    plain_step = inner.step

    def step(action: Any) -> Any:
        """Step as ManiSkill: after a reset ``info`` is the reset's, and the step's lies in ``final_info``."""
        obs, reward, terminated, truncated, info = plain_step(action)
        if truncated.any():
            info = {"final_info": info, "rewards": {"late": torch.zeros(3)}}
        return obs, reward, terminated, truncated, info

    inner.step = step
    env = started(inner)
    first, _, last = play(env, 3)
    np.testing.assert_array_equal(last.info["success"], [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(last.info["metrics"]["count"], [3.0, 3.0, 3.0])
    assert jax.tree.structure(first.info) == jax.tree.structure(last.info)
    assert any("rewards/late not carried over" in text for text in env.reports())


def test_an_environment_that_tells_no_success_gives_nan() -> None:
    inner = Counting()
    plain_step = inner.step
    inner.step = lambda action: (*plain_step(action)[:4], {})
    env = started(inner)
    assert np.isnan(play(env, 1)[0].info["success"]).all()


def test_the_first_seed_settles_all_start_states() -> None:
    env = TorchVector(Counting())
    first, other = env.reset(SEEDS), env.reset(SEEDS + np.uint32(7))
    assert not env.seeds_rows
    assert (first[:, 3] != other[:, 3]).all()
    np.testing.assert_array_equal(env.reset(SEEDS), first)


def test_single_rows_are_reset_by_the_environments_own_option() -> None:
    for option in ("env_ids", "env_idx"):
        env = TorchVector(Counting(partial=option), row_reset_option=option)
        env.reset(SEEDS)
        play(env, 2)
        obs = env.reset(SEEDS, np.array([False, True, False]))
        np.testing.assert_array_equal(obs[:, 1], [2.0, 0.0, 2.0])


@cases(
    "partial option message",
    (None, "env_ids", r"for rows \[1\] changed other rows too; set .*row_reset_option"),
    ("env_idx", "env_ids", "changed other rows too"),
    ("env_ids", None, r"rows \[1\] must be reset, and row_reset_option is off"),
)
def test_an_environment_that_cannot_reset_single_rows_is_told_of(
    partial: str | None, option: str | None, message: str
) -> None:
    env = started(Counting(partial=partial), row_reset_option=option)
    play(env, 2)
    refused(env.reset, SEEDS, np.array([False, True, False]), match=message)


def test_a_row_that_is_not_finite_costs_one_episode(tmp_path: Path) -> None:
    env = TorchVector(Counting(nan_at=2))
    guarded = GuardedEnv(env, lambda: env, recipe={"id": "torch:x"}, folder=tmp_path)
    guarded.reset(SEEDS)
    _, broken, after = play(guarded, 3)
    np.testing.assert_array_equal(broken.info["valid"], [True, False, True])
    np.testing.assert_array_equal(broken.obs[:, 1], [2.0, 0.0, 2.0])
    np.testing.assert_array_equal(after.obs[:, 1], [0.0, 1.0, 0.0])
    texts = guarded.reports()
    (report,) = [text for text in texts if "quarantined row 1" in text]
    assert "ejax replay" not in report and "does not seed rows one by one" in report
    assert any("no terminal observations" in text for text in texts)  # the environment's own reports come through


def broken(change: Any) -> Any:
    """Make an environment whose steps are changed."""
    inner = Counting()
    plain_step = inner.step
    inner.step = lambda action: change(*plain_step(action))
    return inner


@cases(
    "change message",
    (lambda o, r, te, tr, i: (o, r[:, None], te, tr, i), r"reward has shape \[3, 1\]"),
    (lambda o, r, te, tr, i: (o, r.numpy(), te, tr, i), r"reward is a ndarray"),
    (lambda o, r, te, tr, i: (o, r, te.float(), tr, i), r"terminated is torch.float32"),
    (lambda o, r, te, tr, i: (o, r, te, tr[:2], i), r"truncated has shape \[2\]"),
    (lambda o, r, te, tr, i: (o[:, :2], r, te, tr, i), r"obs has shape \[3, 2\]"),
    (lambda o, r, te, tr, i: ({"a": o}, r, te, tr, i), r"obs is a dict"),
    (lambda o, r, te, tr, i: (o, r, te, i), r"step gave 4 things, .*RSL-RL's wrappers give four"),
    (lambda o, r, te, tr, i: (o, r, te, ~te, {"final_obs": o[:1]}), r"info.final_obs has shape \[1, 4\]"),
    (lambda o, r, te, tr, i: (o, r, te, tr, {"success": te[:, None]}), r"info.success has shape \[3, 1\]"),
    (lambda o, r, te, tr, i: (o * 1j, r, te, tr, i), r"obs is a tensor complex64\[3, 4\]"),
)
def test_what_is_no_answer_of_a_vector_environment_is_refused(change: Any, message: str) -> None:
    env = started(broken(change))
    refused(play, env, 1, match=message)


def test_missing_parts_of_an_observation_are_named() -> None:
    inner = Nested(copies=True)
    inner.observe = lambda: {"policy": inner.buffer[:, :2]}
    refused(started, inner, word="obs lacks image of its space; it has policy")


def test_a_tuple_of_another_number_of_parts_is_refused() -> None:
    part = spaces.Box(-1, 1, (2,))
    for given in ((), (torch.zeros(3, 2),) * 2):
        inner = Nested(copies=True)
        inner.single_observation_space = spaces.Tuple((part,))
        inner.observe = lambda given=given: given
        refused(started, inner, word=f"obs has {len(given)} parts, its space is a Tuple of 1")


class ResetsNext(Counting):
    """Resets rows that ended in the step after, whose action it passes over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def step(self, action: Any) -> Any:
        ended = torch.nonzero(self.buffer[:, 1] >= self.length + self.buffer[:, 0])[:, 0]
        self.buffer[:, 1] += 1.0
        super()._start(ended)
        truncated = self.buffer[:, 1] >= self.length + self.buffer[:, 0]
        return self.observe(), self.buffer[:, 1].clone(), torch.zeros_like(truncated), truncated, {}


def test_a_step_that_only_resets_is_no_transition() -> None:
    """Episodes of 2, 3 and 4 steps."""
    env = started(ResetsNext(length=2))
    steps = play(env, 5)
    np.testing.assert_array_equal([step.truncated for step in steps[1:4]], np.eye(3, dtype=bool))
    invalid = [[False, False, False], [False, False, False], [True, False, False], [False, True, False]]
    np.testing.assert_array_equal([~step.info["valid"] for step in steps[:4]], invalid)
    np.testing.assert_array_equal(~steps[4].info["valid"], [False, False, True])
    for step in steps:  # what ended is seen before it is reset
        np.testing.assert_array_equal(step.final_obs, step.obs)
    np.testing.assert_array_equal([step.obs[0, 1] for step in steps], [1, 2, 0, 1, 2])
    assert env.reports() == []
    env.reset(SEEDS)
    assert play(env, 1)[0].info["valid"].all()


def test_a_rollout_masks_the_steps_that_only_reset() -> None:
    rollout = collected(ResetsNext(length=2), 5, 1)
    np.testing.assert_array_equal(rollout.valid[:, 0], [True, True, False, True, True])
    np.testing.assert_array_equal(rollout.truncated[:, 0], [False, True, False, False, True])


def with_metadata(mode: AutoresetMode) -> Any:
    inner = Counting()
    inner.metadata = {"autoreset_mode": mode}
    return inner


@cases(
    "make_one options message",
    (Counting, {"device": "cuda:1"}, "obs is on cpu, the environment was to be on cuda:1"),
    (lambda: with_metadata(AutoresetMode.DISABLED), {}, "must reset rows that ended itself"),
    (
        lambda: SimpleNamespace(num_envs=2, reset=print, step=print, close=print),
        {},
        "has no single_observation_space that is a space of Gymnasium, got None",
    ),
)
def test_an_environment_that_does_not_fit_is_refused(make_one: Any, options: dict[str, Any], message: str) -> None:
    refused(lambda: started(make_one(), **options), match=message)


def test_info_may_be_none_or_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    env = started(broken(lambda o, r, te, tr, i: (o, r, te, tr, None)))
    assert np.isnan(play(env, 3)[-1].info["success"]).all()
    plain = TorchVector(Counting(final="final_obs"))
    wrapped = TorchVector(broken(lambda o, r, te, tr, i: (o, r, te, tr, tensordict.TensorDict(i, batch_size=3))))
    wrapped.env.final = "final_obs"
    played = []
    for env in (plain, wrapped):
        env.reset(SEEDS)
        played.append(play(env, 4))
    chex.assert_trees_all_equal(*played)


def test_isaac_labs_name_of_the_episodes_length_is_known() -> None:
    inner = Counting()
    inner.max_episode_length = 7
    assert TorchVector(inner).max_episode_steps == 7


def test_bfloat16_becomes_float32() -> None:
    env = started(broken(lambda o, r, te, tr, i: (o, r.bfloat16(), te, tr, i)))
    assert play(env, 1)[0].reward.dtype == np.float32


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_does_not_start_an_environment_of_torch(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(config_for("torch_tasks:Counting")))
    refused(load_config, file, match=r"env\.id: .*add --trust torch_tasks:Counting to the command line")
    config = load_config(file, ["env.id=torch:torch_tasks:Counting"])
    assert config.env.id == "torch:torch_tasks:Counting"


def test_options_that_the_factory_refuses_are_a_config_error() -> None:
    config = parse_config(config_for("torch_tasks:Counting", lenght=3))
    refused(build_env, config, match=r"env\.cfg.*unexpected keyword argument 'lenght'")


@pytest.mark.slow
def test_training_runs_evaluates_and_resumes(tmp_path: Path) -> None:
    config = parse_config(config_for("torch_tasks:Counting", length=5))
    result = train(config, run_dir=tmp_path / "run")
    assert result.finished
    assert result.last_eval_metrics["eval/avg_length"] == 5.0
    assert result.last_eval_metrics["eval/metrics/count"] == 5.0
    assert 0.0 < result.last_eval_metrics["eval/success_rate"] < 1.0  # only row 0 terminates
    more = RunConfig.model_validate(config.to_dict() | {"trainer": config.to_dict()["trainer"] | {"iterations": 3}})
    assert train(more, run_dir=tmp_path / "run", resume="latest").num_updates == 3


def test_a_policy_trained_in_torch_is_exported(tmp_path: Path) -> None:
    config = parse_config(config_for("torch_tasks:Counting", length=5, final="final_obs", max_episode_steps=5))
    run = train(config, run_dir=tmp_path / "run").run_dir
    report = export_run(run, tmp_path / "out", ["pt"])
    assert report["rows"]["environment"] == 16 * 128
    assert (
        report["clipping"] == "to the action space, as the environment does"
    )  # clip_actions, where it does not itself
    contract = json.loads((tmp_path / "out" / "contract.json").read_text())
    assert contract["env"] == {**config.to_dict()["env"], "parameters": None, "max_episode_steps": 5}


def test_embodichains_point_mass_moves_and_pays_as_ejaxs() -> None:
    """The same state and action in both: positions and rewards agree in float32."""
    package = importlib.util.find_spec("embodichain")
    if package is None or package.origin is None:
        pytest.skip("needs the package embodichain")
    file = Path(package.origin).parents[1] / "embodichain_tasks" / "classic_control" / "point_mass.py"
    trust(f"{file}:PointMassEnv")
    env = make(f"{file}:PointMassEnv", num_envs=8, success_bonus=5.0)
    ours, inner = PointMassRL(success_bonus=5.0), env.env
    assert env.max_episode_steps == ours.max_episode_steps
    env.reset(np.arange(8, dtype=np.uint32))
    state, _ = jax.vmap(ours.reset)(jax.random.split(jax.random.key(0), 8))
    rng = np.random.default_rng(0)
    compared = 0
    for _ in range(30):
        theirs = {name: getattr(inner, name).numpy() for name in state.__dataclass_fields__}
        state = state.replace(**{name: np.asarray(x, getattr(state, name).dtype) for name, x in theirs.items()})
        action = rng.uniform(-1.5, 1.5, (8, 2)).astype(np.float32)
        _, timestep = jax.vmap(ours.step, in_axes=(0, 0, None))(state, action, jax.random.key(0))
        step = env.step(action)
        going = ~(step.terminated | step.truncated)
        np.testing.assert_allclose(step.reward, timestep.reward, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(step.obs[going], timestep.obs[going], rtol=1e-5, atol=1e-6)
        compared += int(going.sum())
    assert compared > 200
