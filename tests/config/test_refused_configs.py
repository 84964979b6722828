"""Configs that no run can have: each is refused at its key, in short, before anything is built."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from case_tables import cases, keys_of, refusals, refused
from small_configs import BASE, ROOT, gym, make, of, trainer

from ejax.algorithms.ppo import ALGORITHM as PPO
from ejax.algorithms.ppo import PPOConfig
from ejax.config import load_config, parse_config
from ejax.config.embodichain.check import check
from ejax.distributions import action_spec
from ejax.training.build import build
from ejax.training.policies import Spaces, make_policy

CART_POLE = ROOT / "tests" / "gym_configs" / "cart_pole.json"
CLONING = {"algorithm": {"name": "bc", "cfg": {}}, "data": {"source": "engine", "task": "PushCubeExpert"}}
BOMB = "[&a [x,x,x,x,x,x,x,x,x], " + ", ".join(
    f"&{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
CARTS = "env=gymnax:CartPole-v1"
ADAPTIVE = {"batch_size": 32, "schedule": "adaptive", "desired_kl": 0.01, "lr_scheduler": {"name": "linear"}}


@refusals(
    ("trainer.sead=3", "trainer.sead", "Did you mean 'seed'?"),
    ("trainer.rollout_step=3", "trainer.rollout_step", "Did you mean 'rollout_steps'?"),
    ("policy.actor.hiden_sizes=[1]", "policy.actor.hiden_sizes", "allowed: memory, network_cfg, type. Did you mean"),
    ("trainer.num_envs=0", "trainer.num_envs", "got 0; must be greater than 0"),
    ("trainer.num_envs=true", "trainer.num_envs", "got True; must be a valid integer"),
    ("trainer.num_envs='64'", "trainer.num_envs", "got '64'; must be a valid integer"),
    ("trainer.iterations=-1", "trainer.iterations", "got -1; must be greater than 0"),
    ("trainer.total_timesteps='1.5'", "trainer.total_timesteps", "got '1.5'; must be a valid integer"),
    ("trainer.total_timesteps=1000000000000000", "trainer.total_timesteps", "at most 2147483647 are counted"),
    ("trainer.keep_checkpoints=1e6", "trainer.keep_checkpoints", "must be an integer, such as 1000000"),
    ("trainer.exp_name=12e3", "trainer.exp_name", "got 12000.0; must be a valid string: put it in quotes"),
    ("trainer.iterations=1:30", "trainer.iterations", "got '1:30'; must be a valid integer"),
    ("trainer.iterations=1_00", "trainer.iterations", "got '1_00'"),
    ("trainer.enable_eval=yes", "trainer.enable_eval", "got 'yes'; must be a valid boolean"),
    ("trainer.enable_eval=1", "trainer.enable_eval", "got 1; must be a valid boolean"),
    ("trainer.eval_freq=-1", "trainer.eval_freq", "got -1"),
    ("trainer.best_eval_mode=maximum", "trainer.best_eval_mode", "allowed: max, min. Did you mean 'max'?"),
    ("trainer.best_eval_metric=eval/success", "trainer.best_eval_metric", "Did you mean 'eval/success_rate'?"),
    ("trainer.device=mps", "trainer.device", "got 'mps'; allowed: cpu, cuda"),
    ("trainer.device=cuda", "trainer.device", "got 'cuda', but the devices of jax here are cpu"),
    ("trainer.device=gpu:1", "trainer.device", "got 'cuda:1', but the devices of jax here are cpu"),
    ("trainer.device=cpu:99", "trainer.device", "got 'cpu:99', but the devices of jax here are cpu"),
    ("trainer.device=0", "trainer.device", "got 0; must be a valid string"),
    ("trainer.updates_per_dispatch=many", "trainer.updates_per_dispatch", "got 'many'"),
    ("trainer.exp_name=a/b", "trainer.exp_name", "must be part of a folder's name"),
    ("trainer.exp_name=" + "x" * 300, "trainer.exp_name", "at most 180 bytes"),
    ("trainer.events=[1]", "trainer.events", "must be a section with the keys train, eval"),
    ("trainer.events.test={}", "trainer.events.test", "unknown key; allowed: eval, train"),
    ("trainer.events.train.a={func: f}", "trainer.events.train.a.func", "no events functor 'f'; there is randomize_"),
    *(
        (f"trainer.events.train.a={{func: {func}}}", "trainer.events.train.a.func", "must be a valid string")
        for func in ("[1]", "{a: 1}", "5", "[1], mode: reset", "{a: 1}, mode: reset")
    ),
    ("trainer.learning_env=PointMas", "trainer.learning_env", "no env 'PointMas'; there is"),
    ("trainer.learning_env={name: PointMassRL, params: {}}", "trainer.learning_env.params", "allowed: cfg"),
    ("env=playgound:CartpoleBalance", "env", "Did you mean 'playground:CartpoleBalance'?"),
    ("env.cfg.sucess_bonus=1", "env.cfg.sucess_bonus", "Did you mean 'success_bonus'?"),
    ("env.cfg.rewards.speed=1", "env.cfg.rewards.speed", "no such term of the reward"),
    ("env.cfg.success_bonus=true", "env.cfg.success_bonus", "got True; must be a valid number"),
    ("env.cfg.success_bonus=-1", "trainer.learning_env.cfg", "success_bonus must be >= 0, got -1"),
    ("policy.name=actor_critc", "policy.name", "Did you mean 'actor_critic'?"),
    ("policy.vla_config.model_path=a.pth", "policy.vla_config", "belongs to the policy vla, not to actor_critic"),
    ("policy.name=vla", "policy.vla_config", "is missing: vla needs"),
    (
        "policy={name: vla, vla_config: {model_config: {widht: 8}}}",
        "policy.vla_config.model_config.widht",
        "Did you mean 'width'",
    ),
    ("policy={name: vla, vla_config: {}, squash_actions: true}", "policy.squash_actions", "vla does not have it"),
    ("policy={name: vla, vla_config: {robot_type: CobotMagic}}", "policy.vla_config.robot_type", "EmbodiChain's model"),
    ("policy={name: actor_only, critic: {hidden_sizes: [8]}}", "policy.actor", "is missing: actor_only needs"),
    ("policy.action_dim=3", "policy.action_dim", "but the env's actions have 2; use 2, or leave it out"),
    ("policy.critic=null", "policy.critic", "is missing: actor_critic needs"),
    ("policy.cfg.x=1", "policy.cfg", "actor_critic takes no cfg"),
    ("policy.actor.type=cnn", "policy.actor.type", "got 'cnn'; allowed: mlp"),
    ("policy.actor.activation=rellu", "policy.actor.activation", "Did you mean 'relu'?"),
    ("policy.actor.orthogonal_init=[1, 1]", "policy.actor.network_cfg", "needs one gain for each of the 3 Linear"),
    ("policy.actor.dropout_p=1", "policy.actor.dropout_p", "got 1; must be less than 1"),
    ("policy.initial_log_std=9", "policy.initial_log_std", "got 9.0, outside log_std_range [-5.0, 2.0]"),
    ("policy.log_std_range=[1, 1]", "policy.log_std_range", "the first must be below the second"),
    ("policy.log_std_range=[1]", "policy.log_std_range.1", "is missing"),
    ("policy.initial_action_std=0", "policy.initial_action_std", "got 0; must be a number above 0"),
    ("policy.action_std_range=[1]", "policy.action_std_range", "got [1]; must be [lowest, highest]"),
    ("algorithm.name=pp", "algorithm.name", "Did you mean 'ppo'?"),
    ("algorithm.cfg.batch_size=129", "algorithm.cfg.batch_size", "use at most 128: algorithm.cfg.batch_size=128"),
    ("algorithm.cfg.num_mini_batches=129", "algorithm.cfg.num_mini_batches", "algorithm.cfg.num_mini_batches=128"),
    ("algorithm.cfg.gamma=1.5", "algorithm.cfg.gamma", "got 1.5; must be less than or equal to 1"),
    ("algorithm.cfg.gamma=true", "algorithm.cfg.gamma", "got True; must be a valid number"),
    ("algorithm.cfg.gamma=.nan", "algorithm.cfg.gamma", "must be a finite number"),
    ("algorithm.cfg.schedule=adaptive", "algorithm.cfg.desired_kl", "is missing: schedule 'adaptive' needs it"),
    ("algorithm.cfg.minimum_learning_rate=1.0", "algorithm.cfg", "below minimum_learning_rate"),
    ("algorithm.cfg.optimizer.name=adm", "algorithm.cfg.optimizer.name", "got 'adm'; allowed: adam,"),
    ("algorithm.cfg.optimizer.kwargs.lr=1", "algorithm.cfg.optimizer.kwargs", "is optimizer.learning_rate"),
    ("algorithm.cfg.optimizer.kwargs.bettas=1", "algorithm.cfg.optimizer.kwargs.bettas", "Did you mean 'betas'?"),
    ("algorithm.cfg.optimizer.kwargs.eps=true", "algorithm.cfg.optimizer.kwargs.eps", "got True"),
    ("algorithm.cfg.optimizer=adam", "algorithm.cfg.optimizer", "keys name, learning_rate, kwargs"),
    ("algorithm.cfg.lr_scheduler={name: step}", "algorithm.cfg.lr_scheduler.kwargs.step_size", "is missing"),
    ("algorithm.cfg.lr_scheduler.kwargs.gamma=1", "algorithm.cfg.lr_scheduler.kwargs", "name one of linear, cosine"),
    (
        "algorithm.cfg.lr_scheduler={name: linear, kwargs: {total_iters: 100000000000}}",
        "algorithm.cfg.lr_scheduler.kwargs.total_iters",
        "",
    ),
    ("seed=3", "seed", "unknown key; allowed: algorithm, compat, data, env"),
    ("trainer.num_envs.x=3", "override 'trainer.num_envs.x=3'", "trainer.num_envs is 8, not a section"),
    ("trainer.seed", "override 'trainer.seed'", "must read section.key=value, such as trainer.seed="),
    ("trainer.seed=[", "override 'trainer.seed=['", "expected the node content, but found '<stream end>"),
    ("a." * 3000 + "b=1", "override 'a.a", "must read section.key=value"),
    ("trainer.seed=!!int abc", "override 'trainer.seed=!!int abc'", "which is not a !!int"),
    ("trainer.seed=&a [*a]", "override", "an alias lies inside"),
    ("trainer.seed=" + "[" * 5000, "override", "nested deeper"),
    ("trainer.seed=" + "9" * 5000, "override", "which is not a !!int"),
    (f"trainer.seed={BOMB}]", "override", "has more than 10000 keys and values"),
    ("trainer.seed=a\x1bb", "override", "'\\x1b' is not allowed"),
    ("trainer.seed=" + "x" * 10**6, "override", "or as much text"),
    ('trainer.output_dir="a\\0b"', "override", "null characters"),
    ('trainer.exp_name="\\ud800"', "override", "surrogate pairs"),
    ("trainer.a\x00=1", "trainer.a", "null characters"),
    ("trainer=5", "trainer", "must be a section"),
    # numbers that no array holds
    ("policy.actor.network_cfg.orthogonal_init=.nan", "policy.actor.network_cfg.orthogonal_init", "finite"),
    ("policy.actor.network_cfg.orthogonal_init=[1, .inf, 1]", "policy.actor.network_cfg.orthogonal_init.1", "finite"),
    ("env.cfg.success_threshold=.inf", "env.cfg.success_threshold", "finite"),
    ("env.cfg.mass=1.0e+39", "env.cfg.mass", "where float32 ends"),
    ("env.cfg.dt=-.inf", "env.cfg.dt", "finite"),
    ("env.cfg.success_bonus=4294967296", "env.cfg.success_bonus", "integers are within ±2147483647"),
    ("env.cfg.max_episode_steps=2147483648", "env.cfg.max_episode_steps", "integers are within"),
    ("trainer.updates_per_dispatch=2147483648", "trainer.updates_per_dispatch", "integers are within"),
    ("trainer.num_envs=1.0e+12", "trainer.num_envs", "integers are within"),
    ("trainer.keep_checkpoints=4294967296", "trainer.keep_checkpoints", "integers are within"),
    ("algorithm.cfg.max_grad_norm=.nan", "algorithm.cfg.max_grad_norm", "finite"),
    ("algorithm.cfg.max_grad_norm=-.inf", "algorithm.cfg.max_grad_norm", ""),
    ("algorithm.cfg.n_epochs=2147483648", "algorithm.cfg.n_epochs", "integers are within"),
    ("algorithm.cfg.optimizer.kwargs={betas: [.nan, 0.9]}", "algorithm.cfg.optimizer.kwargs.betas.0", "finite"),
    ("trainer.collector.env_timeout_s=1.0e+30", "trainer.collector.env_timeout_s", ""),
)
def test_a_bad_value_is_refused_at_its_key_with_the_remedy(given: str, key: str, word: str) -> None:
    error = refused(make, given, key=key, word=word)
    assert len(error.problems) == 1 and len(error.problems[0].text) < 2500


@refusals(
    (["trainer.buffer_size=2000000000", "trainer.num_envs=2"], "trainer.buffer_size", "at most 2147483647 are counted"),
    (
        ["trainer.enable_eval=true", "trainer.num_eval_episodes=0"],
        "trainer.num_eval_episodes",
        "got 0 with enable_eval",
    ),
    ({"algorithm": {"name": "ppo", "cfg": ADAPTIVE}}, "algorithm.cfg.schedule", "got 'adaptive' together with"),
    ({"algorithm": {"name": "ppo", "cfg": {"learning_rate": -1}}}, "algorithm.cfg.learning_rate", "got -1"),
    ({"trainer": trainer(learning_env="X")}, "trainer.learning_env", "no env 'X'"),
    ({"trainer": trainer(learning_env={"name": "X"})}, "trainer.learning_env.name", "no env 'X'"),
    ({"trainer": trainer(seed=10**1000)}, "trainer.seed", "integer of more than"),
    ({"env": "CartPoleRL"}, "trainer.learning_env", "means the same as env, which is given too"),
    ({"trainer": {"num_envs": 8}}, "env", "is missing; set trainer.gym_config, trainer.learning_env"),
    *(({section: []}, section, "must be a section with the keys") for section in ("trainer", "policy", "algorithm")),
    *(
        ({key: value, **compat}, key, "")
        for key, value in (("trainer", 5), ("trainer", None), ("policy", "x"), ("runtime", "x"), ("compat", ["x"]))
        for compat in ([{}, {"compat": "embodichain-0.3"}] if key != "compat" else [{}])
    ),
    *(
        ({"trainer": {"gym_config": str(CART_POLE)}, "env": beside}, "env", "")
        for beside in (1, [], {"cfg": 1}, {"cfg": {"gym_config": 3}})
    ),
    *(
        ({"trainer": {"gym_config": name}}, "trainer.gym_config", "there is no")
        for name in ("x" * 300, "/".join(["x" * 100] * 60))
    ),
    ({"trainer": trainer(model_type="vla", buffer_size=100)}, "trainer.buffer_size", "got 100; with model_type vla"),
    ({"trainer": trainer(model_type="vlm")}, "trainer.model_type", "got 'vlm'; allowed: standard, vla"),
    *(
        ({"trainer": trainer(collector={key: value})}, f"trainer.collector.{key}", word)
        for key, value, word in (
            ("mode", "thread", "allowed: auto, device, host, async"),
            ("schedule", "newest", "allowed: fixed, free"),
            ("max_stalenes", 2, "Did you mean 'max_staleness'?"),
            ("max_staleness", -1, "must be greater than or equal to 0"),
            ("num_groups", 3, "got 3, which does not divide num_envs 8"),
            ("env_timeout_s", 0, "must be greater than 0"),
        )
    ),
    # what cloning does not use must be a number all the same
    *(
        ({"trainer": {key: value}, "env": "PushCubeRL", **CLONING}, f"trainer.{key}", "")
        for key in ("num_envs", "buffer_size")
        for value in ("1", True, "x", [1])
    ),
    *(
        ({**CLONING, "trainer": {}, "env": "PushCubeRL", "data": {**CLONING["data"], "task_cfg": task_cfg}}, key, "")
        for task_cfg, key in (
            ({"env": {"id": "x"}}, "data.task_cfg.env.id"),
            ({"env": 3}, "data.task_cfg.env"),
            ({"env": {"reaching_weight": "x"}}, "data.task_cfg.env.reaching_weight"),
            ({"env": {"episode_length": 0}}, "data.task_cfg"),
            ({"noise": "x"}, "data.task_cfg.noise"),
            ({"noise": 2.0}, "data.task_cfg"),
            ({"image_size": [64]}, "data.task_cfg"),
        )
    ),
)
def test_sections_that_fit_no_run_are_refused(given: Any, key: str, word: str) -> None:
    refused(of, copy.deepcopy(given), key=key, word=word)


@pytest.mark.parametrize("section", ["trainer", "policy", "algorithm"])
def test_a_missing_section_is_named(section: str) -> None:
    refused(parse_config, {name: each for name, each in BASE.items() if name != section}, key=section, word="missing")


def test_every_problem_is_in_one_error() -> None:
    error = refused(make, "trainer.sead=3", "trainer.num_envs=0", "trainer.device=cuda", "env.cfg.mas=2")
    assert len(error.problems) == 4 and str(error).startswith("config: 4 problems\n")
    error = refused(make, "env.cfg.dt=.nan", "trainer.sed=1", "env.cfg.mas=1")  # the environment is not asked by then
    assert keys_of(error) == ["env.cfg.dt (override)", "trainer.sed (override)"]
    error = refused(make, trainer=trainer(**{f"key{i}": i for i in range(2000)}))
    assert len(error.problems) == 2000 and "more" in str(error).splitlines()[-1]


def test_a_config_in_memory_that_holds_itself_is_refused() -> None:
    data = copy.deepcopy(BASE)
    data["trainer"]["events"] = data
    refused(parse_config, data, word="nested deeper")


@pytest.mark.parametrize("place", ["':x'", "..a:b", "'os:'", "os:path", "builtins:int", "no_such_module:Name"])
@pytest.mark.parametrize("key", ["env.id", "policy.name", "algorithm.name"])
def test_a_place_with_no_such_code_is_refused_by_its_key(key: str, place: str) -> None:
    (named,) = keys_of(refused(make, f"{key}={place}"))
    assert named in (f"{key} (override)", "algorithm.cfg")


@refusals(
    (("a.toml", ""), "", "'.toml' is not the suffix of a config; allowed: .json, .yaml, .yml"),
    (("a.json", '{"trainer": {},\n"policy" {}}'), "a.json:2", "Expecting ':'"),
    (("a.json", '{"trainer": {"seed": 1, "seed": 2}}'), "", "the key 'seed' is given twice"),
    (("a.yaml", "trainer:\n  seed: 1\n  seed: 2\n"), "a.yaml:3", "the key 'seed' is given twice"),
    (("a.yaml", "trainer: [1\npolicy: 2"), "a.yaml:2", ""),
    (("a.yaml", ""), "", "holds nothing; must be a mapping"),
    (("a.yaml", "- 1"), "", "holds a list; must be a mapping"),
    (("a.yaml", "trainer:\n  exp_name: \xe9\n"), "a.yaml:2", "not UTF-8"),
    ((f"{'x' * 300}.yaml", None), "", "File name too long"),
    (("a\x00b.yaml", None), "", ""),
    (("no.yaml", None), "", "there is no such file"),
)
def test_an_unreadable_file_is_located(given: tuple[str, str | None], key: str, word: str, tmp_path: Path) -> None:
    name, text = given
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    assert key in str(refused(load_config, tmp_path / name, word=word))


@refusals(
    ({"id": "TaskRL", "max_episode_step": 3}, "gym.json:max_episode_step", "'max_episode_steps'"),
    ({"id": "TaskRL", "env": {"event": {}}}, "gym.json:env.event", "Did you mean 'events'"),
    ({"id": "TaskRL", "env": {"extensions": {"actionscale": 1}}}, "gym.json:env.extensions.actionscale", "unknown"),
    ({"id": "TaskR"}, "gym.json:id", "Did you mean 'TaskRL'"),
    ({"env": {}}, "", "gym.json must hold id"),
    (
        {"id": "TaskRL", "max_episode_steps": 3, "env": {"extensions": {"episode_length": 4}}},
        "gym.json:max_episode_steps",
        "is 3, but env.extensions.episode_length is 4",
    ),
)
def test_a_bad_gym_config_is_located(tmp_path: Path, task: None, given: dict[str, Any], key: str, word: str) -> None:
    refused(gym, tmp_path, given, key=key, word=word)


def test_a_missing_gym_config_names_both_places(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": {"gym_config": "no.json"}}))
    error = refused(load_config, tmp_path / "a.json", word=str(tmp_path / "no.json"))
    assert str(Path.cwd() / "no.json") in str(error)


def cart_pole(**sections: Any) -> dict[str, Any]:
    """Return a config of the cart-pole's gym config, with keys of it replaced: ``robot__control_parts={}``."""
    gym_config = json.loads(CART_POLE.read_text())
    for key, value in sections.items():
        *above, name = key.split("__")
        node = gym_config
        for each in above:
            node = node[each]
        node[name] = value
    return {"trainer": {"num_envs": 8}, "env": {"id": "EmbodiedEnv", "cfg": {"gym_config": gym_config}}}


@refusals(
    *((cart_pole(max_episode_steps=limit), "max_episode_steps", "") for limit in (4e18, -(2.0**40))),
    (cart_pole(robot__urdf_cfg={"components": 5}), "robot.urdf_cfg.components", ""),
    (cart_pole(robot__solver_cfg={"arm": {"tcp": [[1] * 4] * 3 + [[0, {}, 0, 1]]}}), "robot.solver_cfg.arm.tcp", ""),
    (cart_pole(robot__solver_cfg={"arm": {"tcp": [[1] * 16]}}), "robot.solver_cfg.arm.tcp", ""),
    (cart_pole(robot__control_parts={"arm": 3}), "robot.control_parts.arm", ""),
    (cart_pole(robot__control_parts={"hand": []}, env__control_parts=["hand"]), "robot.control_parts.hand", ""),
)
def test_a_gym_config_in_memory_is_refused_by_its_key(given: dict[str, Any], key: str, word: str) -> None:
    refused(of, given, key=f"env.cfg.gym_config.{key}", word=word)


def test_squashed_actions_need_bounds_and_actions_numbers() -> None:
    unbounded = cart_pole(env__actions={"velocity": {"func": "QvelTerm"}})
    assert of(unbounded)
    refused(make, "policy.squash_actions=true", key="policy.squash_actions (override)", **unbounded)
    refused(action_spec, gymnasium.spaces.Box(-1.0, 1.0, (0,)), word="at least one number")


def test_observation_groups_are_looked_up_before_anything_is_built() -> None:
    error = refused(make, "policy.obs_groups={actor: [robot]}", word="one array without parts")
    assert keys_of(error) == ["policy.obs_groups.actor", "policy.obs_groups.critic"]
    assert make("policy.obs_groups={actor: [robot.qpos, robot]}", **cart_pole())
    text = "there is robot, robot.qf, robot.qpos, robot.qvel. Did you mean 'robot.qpos'?"
    refused(make, "policy.obs_groups={actor: [robot.qpo]}", key="policy.obs_groups.actor", word=text, **cart_pole())


@cases(
    "override keys",
    ("policy.obs_groups={actor: [x]}", ["policy.obs_groups.actor", "policy.obs_groups.critic"]),
    ("policy={name: vision, actor: {network_cfg: {hidden_sizes: [8]}}}", ["policy.cfg.images"]),
)
def test_parts_of_an_environment_that_must_be_built_are_looked_up_there(override: str, keys: list[str]) -> None:
    assert keys_of(refused(build, make(override, CARTS))) == keys


@refusals(
    ("cfg.channels=[8, 16]", "cfg.channels", "must have more than 2 values"),
    ("cfg.channels=[8, 0, 16]", "cfg.channels", "must be greater than 0"),
    ("cfg.chanels=[8, 16, 16]", "cfg.chanels", "unknown key; allowed: channels, hidden_entries, images. Did you"),
    ("cfg.images=image", "cfg.images", "must be a valid tuple"),
    ("cfg.images=[]", "cfg.images", "names no picture; the observation has image"),
    ("cfg.images=[imag]", "cfg.images", "names 'imag'; the observation has image. Did you mean 'image'?"),
)
def test_options_that_a_policy_class_does_not_take_are_refused(given: str, key: str, word: str) -> None:
    file = ROOT / "configs" / "push_cube" / "bc_images.yaml"
    error = refused(load_config, file, [f"policy.{given}"], word=word)
    assert keys_of(error) == [f"policy.{key} (override)"]


class Hinted:
    """A policy whose annotation only a type checker resolves."""

    def __init__(self, action_spec: "NoSuchType", size: int = 3) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class CustomConfig(PPOConfig):
    curiosity: float = 0.5


CUSTOM = replace(PPO, Config=CustomConfig)


def test_options_of_custom_classes_are_refused_with_their_nearest() -> None:
    hinted = f"policy.name={__name__}:Hinted"
    assert make(hinted, "policy.cfg={size: 5}")
    refused(make, hinted, "policy.cfg={sise: 5}", word="unknown key; allowed: size. Did you mean")
    mistyped = f"algorithm={{name: '{__name__}:CUSTOM', cfg: {{curiosty: 1.0}}}}"
    text = str(refused(make, mistyped, word="Did you mean 'curiosity'?"))
    assert "gae_lambda" in text and "group_size" not in text


def test_an_extra_that_an_environment_inside_another_needs_is_an_error_of_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnax", None)
    file = ROOT / "configs" / "cart_pole" / "distill.yaml"
    refused(load_config, file, word="'gymnax' is not installed: pip install -e '.[gymnax]'")
    assert any("pip install" in note.text for note in check(file) if note.status == "unsupported")


@refusals(
    ({"observation.state": 1, "observation": {"state": 2}}, "env", "'observation.state' reads like a part of"),
    ({1: 1, "1": 2}, "env", "must be non-empty texts"),
    ({"": 1}, "env", "must be non-empty texts"),
)
def test_observations_whose_names_meet_are_refused_before_anything_is_trained(given: Any, key: str, word: str) -> None:
    def space(part: Any) -> gymnasium.Space[Any]:
        if isinstance(part, int):
            return gymnasium.spaces.Box(-1.0, 1.0, (part,))
        return gymnasium.spaces.Dict({name: space(each) for name, each in part.items()})

    spaces = Spaces(space(given), gymnasium.spaces.Box(-1.0, 1.0, (2,)))
    refused(make_policy, make().policy, spaces, key=key, word=word)
