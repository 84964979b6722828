"""Every way in for ``package.module:Name``: a file that names it runs nothing, the person who names it is obeyed."""

import argparse
import copy
import hashlib
import json
import pickle
import re
import shlex
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from case_tables import cases, keys_of, refused
from tiny import tiny

from ejax import evaluate, train
from ejax.config import load_config, parse_config
from ejax.config.__main__ import main as config_main
from ejax.config.embodichain.check import check
from ejax.data import record, worker
from ejax.data.engine import OnlineDataEngine, OnlineDataEngineCfg
from ejax.envs.manager.manager_spec import read_manager_spec
from ejax.envs.terms.registry import find_functor
from ejax.play import __main__ as play
from ejax.play import replay
from ejax.play.saved_policy import elsewhere
from ejax.schema import trust
from ejax.schema.registry import place_of_task, resolve
from ejax.schema.trust import UntrustedCodeError, check_trusted, trusted
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import RunDirectory, create_run_directory
from ejax.training.build import build
from ejax.training.environments import build_env, make_env
from ejax.training.start import rescale_for_devices
from ejax.types import HostEnv

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("nothing_trusted")
PACKAGE = """
import pathlib
pathlib.Path({mark!r}).touch()
from ejax.envs.tasks.point_mass import PointMassRL as Env
"""
MODULE = f"""{PACKAGE}
from ejax.policies.actor_critic import ActorCritic as Policy
from ejax.algorithms.ppo import ALGORITHM as algorithm
from ejax.envs.terms.actions import delta_qpos as action
from dataclasses import dataclass
import jax.numpy as jnp
import gymnasium
from ejax import ObservationWrapper
@dataclass(frozen=True)
class Wrapper(ObservationWrapper):
    factor: float = 1.0
def functor(world, *args, **params): return jnp.zeros(())
class Wanders(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {{{{}}}}
    def step(self, action): return self.observation_space.sample(), 1.0, False, False, {{{{}}}}
gymnasium.register("Wanders-v0", entry_point=Wanders, max_episode_steps=7)
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name the file that ``evilmod`` and the package of ``evilpkg.sub`` leave when they are imported."""
    mark = tmp_path / "mark"
    folder = tmp_path / "importable"
    (folder / "evilpkg").mkdir(parents=True)
    for file, text in (("evilmod.py", MODULE), ("evilpkg/__init__.py", PACKAGE), ("evilpkg/sub.py", PACKAGE)):
        (folder / file).write_text(text.format(mark=str(mark)))
    monkeypatch.syspath_prepend(folder)
    another_process(monkeypatch)
    return mark


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process of the same user: nothing is named, nothing imported."""
    monkeypatch.setattr(trust, "_named", set())
    monkeypatch.setattr(trust, "_passed", set())
    read_manager_spec.cache_clear()
    for name in ("evilmod", "evilpkg", "evilpkg.sub"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(gymnasium.registry, "Wanders-v0", raising=False)


def tree(**sections: Any) -> dict[str, Any]:
    return {**tiny(**{"iterations": 1, **sections.pop("trainer", {})}), **sections}


def write(path: Path, data: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


PUSH_CUBE = json.loads((ROOT / "tests" / "gym_configs" / "push_cube.json").read_text())


def gym_config(section: str) -> dict[str, Any]:
    """PushCube's, with a functor of ``evilmod``."""
    changed = copy.deepcopy(PUSH_CUBE)
    changed["env"][section]["evil"] = {"func": functor(section), "mode": "add"}
    return changed


def functor(section: str) -> str:
    return "evilmod:action" if section == "actions" else "evilmod:functor"


def without_env(**trainer: Any) -> dict[str, Any]:
    return {name: section for name, section in tree(trainer=trainer).items() if name != "env"}


def of_gym_config(folder: Path, data: dict[str, Any], **keys: Any) -> dict[str, Any]:
    write(folder / "gym.json", data)
    return without_env(gym_config="gym.json", **keys)


EMBODIED = {"id": "EmbodiedEnv", "cfg": {"gym_config": gym_config("rewards")}}
RENDERED = {"id": "RenderedEnv", "cfg": {"env": "EmbodiedEnv", "env_cfg": {"gym_config": gym_config("rewards")}}}
EVENT = {"train": {"evil": {"func": "evilmod:functor"}}}
CONFIGS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "env.id": ("evilmod:Env", lambda _: tree(env={"id": "evilmod:Env"})),
    "learning_env": ("evilmod:Env", lambda _: without_env(learning_env="evilmod:Env")),
    "of a package": ("evilpkg.sub:Env", lambda _: tree(env={"id": "evilpkg.sub:Env"})),
    "gymnasium:": ("evilmod:Wanders-v0", lambda _: tree(env={"id": "gymnasium:evilmod:Wanders-v0"})),
    "torch:": ("evilmod:Env", lambda _: tree(env={"id": "torch:evilmod:Env"})),
    "torch: a file": ("evil/evil.py:Env", lambda _: tree(env={"id": "torch:evil/evil.py:Env"})),
    "policy.name": ("evilmod:Policy", lambda _: tree(policy={"name": "evilmod:Policy"})),
    "algorithm.name": ("evilmod:algorithm", lambda _: tree(algorithm={"name": "evilmod:algorithm"})),
    "data.task": ("evilmod:Task", lambda _: tree(data={"source": "engine", "task": "evilmod:Task"})),
    "trainer.events": ("evilmod:functor", lambda folder: of_gym_config(folder, PUSH_CUBE, events=EVENT)),
    "gym config's id": ("evilmod:Env", lambda folder: of_gym_config(folder, {"id": "evilmod:Env", "env": {}})),
    **{
        f"gym config's {section}": (functor(section), lambda folder, at=section: of_gym_config(folder, gym_config(at)))
        for section in ("events", "observations", "rewards", "actions")
    },
    "env.cfg.gym_config": ("evilmod:functor", lambda _: tree(env=EMBODIED)),
    "RenderedEnv's env": ("evilmod:Env", lambda _: tree(env={"id": "RenderedEnv", "cfg": {"env": "evilmod:Env"}})),
    "env.wrappers": ("evilmod:Env", lambda _: tree(env={"id": "PointMassRL", "wrappers": ["evilmod:Env"]})),
    "RenderedEnv's functor": ("evilmod:functor", lambda _: tree(env=RENDERED)),
}


@pytest.mark.parametrize("way", CONFIGS)
def test_a_config_runs_nothing_that_it_names(
    way: str, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, make = CONFIGS[way]
    file = write(tmp_path / "train.json", {**make(tmp_path), "spare": 1})
    error = refused(load_config, file, word=f"add --trust {place} to")
    assert any("--trust" not in problem.text for problem in error.problems)  # the others are listed with it
    told = [note for note in check(file) if note.status == "unsupported" and f"--trust {place}" in note.text]
    assert told
    for command in (["check", str(file)], ["check", str(file), "--json"]):
        assert config_main(command) == 2
    assert train.main(["--config", str(file)]) == 2
    assert f"--trust {place}" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    "way", [way for way in CONFIGS if not way.startswith(("torch", "gymnasium", "data", "policy"))]
)
def test_what_the_command_line_trusts_runs(way: str, mark: Path, tmp_path: Path) -> None:
    """Loading imports nothing in the ways left out: they are run further down, and in the tests of ``interop``."""
    place, make = CONFIGS[way]
    file = write(tmp_path / "train.json", make(tmp_path))
    config_main(["check", str(file), "--trust", place])
    assert mark.exists()


def test_the_command_that_continues_a_run_names_its_own_code(
    mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = write(tmp_path / "train.json", tree(env={"id": "evilmod:Env"})), tmp_path / "its run"
    assert train.main(["--config", str(file), "--run", str(run), "--trust", "evilmod:Env"]) == 0
    command = RunDirectory(run, "tiny").resume_command
    another_process(monkeypatch)
    assert train.main([*shlex.split(command)[2:], "trainer.iterations=2"]) == 0
    library = create_run_directory(parse_config(tree(env={"id": "gymnasium:Pendulum-v1"})), tmp_path / "theirs")
    assert library.resume_command.endswith("theirs --resume latest")


def test_a_functor_is_refused_by_its_own_key(mark: Path, tmp_path: Path) -> None:
    for way, key in (
        ("gym config's id", "gym.json:id"),
        ("gym config's rewards", "gym.json:env.rewards.evil.func"),
        ("RenderedEnv's functor", "env.cfg.gym_config.env.rewards.evil.func"),
        ("trainer.events", "trainer.events.train.evil.func"),
    ):
        error = refused(load_config, write(tmp_path / "train.json", CONFIGS[way][1](tmp_path)))
        assert keys_of(error) == [key]


def test_import_modules_of_a_config_are_not_imported(mark: Path, tmp_path: Path) -> None:
    load_config(write(tmp_path / "train.json", tree(trainer={"import_modules": ["evilmod"]})))
    assert not mark.exists()


@pytest.mark.parametrize("override", ["env.id=evilmod:Env", "env={id: evilmod:Env, cfg: {}}"])
def test_an_override_is_a_persons_word(override: str, mark: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "train.json", tree())
    assert load_config(file, [override]).env.id == "evilmod:Env"
    assert mark.exists()


def test_a_wrapper_with_options_is_named_by_a_key(mark: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "train.json", tree())
    load_config(file, ["env.wrappers=[{evilmod:Wrapper: {factor: 0.5}}]"])
    trust._named.clear()
    given = {"id": "PointMassRL", "wrappers": [{"evilmod:Wrapper": {"factor": 0.5}}]}
    run = create_run_directory(parse_config(tree(env=given)), tmp_path / "run")
    assert run.resume_command.endswith(" --trust evilmod:Wrapper")
    assert list(run.versions()["code"]) == ["evilmod"]


def test_one_name_lets_through_no_other_of_its_module(mark: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "train.json", tree(policy={"name": "evilmod:Policy"}))
    refused(load_config, file, ["env.id=evilmod:Env"], word="--trust evilmod:Policy")


def test_a_config_in_memory_is_the_programs_own_word(mark: Path, tmp_path: Path) -> None:
    config = parse_config(tree(env={"id": "evilmod:Env"}))
    assert config.env.id == "evilmod:Env" and mark.exists()


def test_a_gym_config_that_a_program_refers_to_is_a_file(mark: Path, tmp_path: Path) -> None:
    config = of_gym_config(tmp_path, {"id": "evilmod:Env", "env": {}})
    refused(parse_config, config, folder=tmp_path, word="--trust evilmod:Env")
    assert not mark.exists()


@cases(
    "ask",
    lambda: resolve("env", "evilmod:Env"),
    lambda: resolve("policy", "evilmod:Policy"),
    lambda: make_env("evilmod:Env", {}, num_envs=2),
    lambda: make_env("gymnasium:evilmod:Wanders-v0", {}, num_envs=2),
    lambda: make_env("gymnasium:evilmod:Wanders-v0", {"vectorization": "async"}, num_envs=2),
    lambda: make_env("gymnasium:GymV26Environment-v0", {"env_id": "evilmod:Wanders-v0"}, num_envs=2),
    lambda: find_functor("rewards", "evilmod:functor"),
    lambda: make_env("PointMassRL", {}, num_envs=2, wrappers=[("evilmod:Env", {})]),
    lambda: place_of_task("evilmod:Task"),
)
def test_a_programs_calls_pass_the_same_gate(ask: Callable[[], Any], mark: Path) -> None:
    refused(ask, match=r"\(found in .*evilmod\.py\) .* add --trust evilmod:", error=UntrustedCodeError)
    assert not mark.exists()


def test_trust_opens_it(mark: Path) -> None:
    trust.trust("evilmod:Env")
    assert resolve("env", "evilmod:Env").__name__ == "PointMassRL"
    refused(trust.trust, "evilmod", word="got 'evilmod'; write package.module:Name")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_gymnasiums_module_is_imported_once_it_is_named(vectorization: str, mark: Path, tmp_path: Path) -> None:
    env = {"id": "gymnasium:evilmod:Wanders-v0", "cfg": {"vectorization": vectorization}}
    file = write(tmp_path / "train.json", tree(env=env, trainer={"num_envs": 2}))
    trust.trust_words(["evilmod:Wanders-v0"])
    config = load_config(file)
    assert not mark.exists()
    made = build_env(config, quarantine=tmp_path)
    assert isinstance(made, HostEnv) and mark.exists()
    assert (made.num_envs, made.max_episode_steps) == (2, 7)
    made.reset(np.arange(2, dtype=np.uint32))
    np.testing.assert_array_equal(made.step(np.zeros((2, 1), np.float32)).reward, [1.0, 1.0])
    made.close()


def test_an_override_may_name_gymnasiums_module(mark: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "train.json", tree())
    env = build_env(load_config(file, ["env.id=gymnasium:evilmod:Wanders-v0"]), quarantine=tmp_path)
    assert isinstance(env, HostEnv)
    env.close()


def test_what_gymnasium_does_not_have_is_told(mark: Path) -> None:
    trust.trust("evilmod:Wander-v0", "no_such_module:Wanders-v0")
    text = "no environment 'Wander-v0'; nearest: Wanders-v0"
    refused(make_env, "gymnasium:evilmod:Wander-v0", {}, num_envs=1, word=text)
    text = "'no_such_module:Wanders-v0' cannot be imported: No module named"
    refused(make_env, "gymnasium:no_such_module:Wanders-v0", {}, num_envs=1, word=text)


@pytest.fixture
def own_run(mark: Path, tmp_path: Path) -> Path:
    """Make a run whose environment and policy were named on the command line."""
    run = tmp_path / "run"
    file = write(tmp_path / "mine.json", tree())
    assert (
        train.main(["--config", str(file), "--run", str(run), "env.id=evilmod:Env", "policy.name=evilmod:Policy"]) == 0
    )
    mark.unlink()
    return run


def test_a_run_folder_runs_nothing_that_it_names(
    own_run: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    another_process(monkeypatch)
    good = write(tmp_path / "good.json", tree(trainer={"output_dir": str(tmp_path)}))
    commands: list[Callable[[], int]] = [
        lambda: evaluate.main([str(own_run), "--episodes", "2"]),
        lambda: train.main(["--run", str(own_run), "--resume", "latest"]),
        lambda: train.main(["--run", str(own_run), "--resume", "latest", "--config", str(good)]),
        lambda: train.main(["--run", str(own_run), "--resume", "latest"], "pretrain"),
        lambda: train.main(["--config", str(good), f"policy.init_from={own_run}"]),
    ]
    for command in commands:
        assert command() == 2
        assert "--trust evilmod:Env" in capsys.readouterr().err
    assert not mark.exists()
    assert not list(tmp_path.glob("tiny_*")) or not any(tmp_path.glob("tiny_*/checkpoints/*"))

    trusting = ["--trust", "evilmod:Env", "--trust", "evilmod:Policy"]
    assert evaluate.main([str(own_run), "--episodes", "2", "--num-envs", "2", *trusting]) == 0
    assert mark.exists()


def test_a_checkpoints_meta_is_data(own_run: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another_process(monkeypatch)
    (checkpoint,) = (own_run / "checkpoints").iterdir()
    _, meta = load_checkpoint(checkpoint, build(parse_config(tree())).state)
    assert meta["config"]["env"]["id"] == "evilmod:Env"
    assert not mark.exists()


def test_a_checkpoint_resumed_on_other_devices_runs_nothing(own_run: Path, tmp_path: Path, mark: Path) -> None:
    """Its config is compared with the run's own, by which the environments are shared out."""
    config = parse_config(tree())
    for change, reason in (
        ({"algorithm": {"name": "evilmod:algorithm", "cfg": {}}}, "names the algorithm 'evilmod:algorithm'"),
        ({"env": {"id": "evilmod:Env"}, "algorithm": {"name": "ppo", "cfg": {"clip": 1}}}, "not a config of this run"),
        ({"trainer": {"num_envs": "evilmod:Env"}}, "trainer.num_envs is 'evilmod:Env'"),
        ({"trainer": None}, "not a config of this run"),
    ):
        saved = {**config.to_dict(), **change}
        write(
            tmp_path / "meta.json",
            {"schema_version": 2, "versions": {}, "global_step": 0, "num_devices": 2, "config": saved},
        )
        refused(rescale_for_devices, config, tmp_path, 1, match=reason, error=CheckpointError)
    assert not mark.exists()


def test_an_override_opens_the_gate_for_nothing_else_in_a_run(
    own_run: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    another_process(monkeypatch)
    for command in (evaluate.main, play.main):
        assert command([str(own_run), "env.cfg.max_episode_steps=5"]) == 2
        assert "is code that a file alone may not start" in capsys.readouterr().err
    config = parse_config(tree())
    changed = config.model_copy(update={"policy": config.policy.model_copy(update={"name": "evilpkg.sub:Policy"})})
    refused(elsewhere, changed, ["env.cfg.max_episode_steps=5"], match=r"evilpkg\.sub:Policy")
    assert not mark.exists()


class _Pickled:
    """Its pickle imports ``evilmod``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return __import__, ("evilmod",)


def test_a_pickle_in_place_of_a_runs_file_is_not_read_as_one(
    own_run: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with a digest that holds."""
    evil = pickle.dumps(_Pickled())
    like = build(parse_config(tree())).state
    (checkpoint,) = (own_run / "checkpoints").iterdir()
    listing = (checkpoint / "SHA256").read_text()
    another_process(monkeypatch)
    for line in listing.splitlines():
        digest, _, name = line.partition("  ")
        file = checkpoint / name
        kept = file.read_bytes()
        file.write_bytes(evil)
        (checkpoint / "SHA256").write_text(listing.replace(digest, hashlib.sha256(evil).hexdigest()))
        with suppress(Exception):  # what orbax says to it
            load_checkpoint(checkpoint, like)
        file.write_bytes(kept)
        assert not mark.exists(), name
    schedule = tmp_path / "schedule.json"
    schedule.write_bytes(evil)
    collector = {"mode": "async", "replay_schedule": str(schedule)}
    refused(lambda: build(parse_config(tree(trainer={"collector": collector}))), match="replay_schedule")
    assert not mark.exists()
    pickle.loads(evil)  # which does import it
    assert mark.exists()


def test_a_quarantined_episode_runs_nothing_that_it_names(
    mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("evilmod:Env", "gymnasium:evilmod:Wanders-v0"):
        recipe = {"id": name, "cfg": {}}
        facts = {"recipe": recipe, "seed": 0, "seeded": True, "complete": True}
        np.savez(tmp_path / "q.npz", facts=json.dumps(facts), actions=np.zeros((2, 1), np.float32))
        assert replay.main([str(tmp_path / "q.npz")]) == 2
        place = name.removeprefix("gymnasium:")
        assert f"--trust {place} to the command line" in capsys.readouterr().err
        assert not mark.exists()
    assert replay.main([str(tmp_path / "q.npz"), "--trust", "evilmod:Wanders-v0"]) == 1  # it is finite
    assert mark.exists()
    np.savez(tmp_path / "p.npz", facts=np.array([_Pickled()], object), actions=np.zeros(2))
    mark.unlink()
    assert replay.main([str(tmp_path / "p.npz")]) == 2
    assert not mark.exists()


def test_interop_runs_nothing_that_a_run_or_a_config_names(
    own_run: Path, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from interop import embodichain, export

    file = write(tmp_path / "theirs.json", tree(env={"id": "evilmod:Env"}))
    commands: list[Callable[[], int]] = [
        lambda: export.main([str(own_run), "--to", str(tmp_path / "out"), "--formats", "safetensors"]),
        lambda: embodichain.main(["to-pt", str(own_run), "--out", str(tmp_path / "out.pt")]),
        lambda: embodichain.main(
            ["from-pt", str(tmp_path / "x.pt"), "--config", str(file), "--run", str(tmp_path / "r")]
        ),
    ]
    another_process(monkeypatch)
    for command in commands:
        assert command() == 2
        assert "--trust evilmod:Env" in capsys.readouterr().err
        assert not mark.exists()
    trusting = ["--trust", "evilmod:Env", "--trust", "evilmod:Policy"]
    assert embodichain.main(["to-pt", str(own_run), "--out", str(tmp_path / "out.pt"), *trusting]) == 0
    assert mark.exists()


def test_torchs_factory_passes_the_gate(mark: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from interop.envs import make

    (tmp_path / "evil.py").write_text(MODULE.format(mark=str(mark)))
    for place in ("evilmod:Env", f"{tmp_path}/evil.py:Env"):
        refused(make, place, num_envs=2, match=f"add --trust {place} to", error=UntrustedCodeError)
        assert not mark.exists()
    trust.trust(f"torch:{tmp_path}/evil.py:Env")
    with pytest.raises(TypeError, match="num_envs"):  # it is no factory, but it is run
        make(f"{tmp_path}/evil.py:Env", num_envs=2)
    assert mark.exists()


@pytest.mark.parametrize("name", ["evilmod", ":Env", "evilmod:", ".evil:Env", "a b:Env", "x:y; rm -rf ~", "a:b:c"])
def test_what_is_no_place_is_refused_without_a_command_to_copy(name: str) -> None:
    with pytest.raises(UntrustedCodeError, match=r"is not a place of code; write package\.module:Name$") as error:
        trust.check_trusted(name)
    assert "--trust" not in str(error.value)


def test_a_refusal_is_safe_to_show_and_to_copy() -> None:
    with pytest.raises(UntrustedCodeError) as error:
        trust.check_trusted("\x1b[2Jevil" + "x" * 10**6)
    assert len(str(error.value)) < 400 and "\x1b" not in str(error.value)
    with pytest.raises(UntrustedCodeError) as error:
        trust.check_trusted("evil" + "x" * 10**6 + ":Env")
    assert len(str(error.value)) < 400
    with pytest.raises(UntrustedCodeError, match=r"\(there is no file of 'no_such_module\.env' here\)"):
        trust.check_trusted("no_such_module.env:Env")
    refused(trust.check_trusted, "$(boom).py:Env", match=r"--trust '\$\(boom\)\.py:Env'", error=UntrustedCodeError)


def test_the_option_takes_names_only(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    trust.add_trust_option(parser)
    assert parser.parse_args(["--trust", "a.b:C", "--trust", "torch:d.py:e"]).trust == ["a.b:C", "torch:d.py:e"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--trust", "a.b"])
    assert "got 'a.b'; write package.module:Name" in capsys.readouterr().err


@cases(
    "command",
    train.main,
    evaluate.main,
    replay.main,
    record.main,
    partial(train.main, name="pretrain"),
    lambda argv: config_main(["check", *argv]),
)
def test_every_command_that_opens_a_file_has_the_option(command: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["--help"])
    assert "--trust package.module:Name" in capsys.readouterr().out


def test_every_test_that_the_table_names_is_there() -> None:
    table = (ROOT / "benchmarks" / "notes" / "ways_in.md").read_text()
    named = re.findall(r"(test_\w+\.py)?::(test_\w+)", table)
    assert len(named) > 15
    for file, name in named:
        [path] = (ROOT / "tests").rglob(file or "test_trust.py")
        assert f"def {name}(" in path.read_text(), name


def test_a_worker_imports_what_its_order_names(mark: Path) -> None:
    """Its owner has asked the gate; the worker is another process."""
    worker._make_task(pickle.dumps(("evilmod:Env", {})))
    assert mark.exists()
    refused(resolve, "policy", "evilmod:Policy", error=UntrustedCodeError)


def test_a_worker_lets_through_what_its_owner_does_and_no_more(mark: Path) -> None:
    refused(check_trusted, "evilmod:Env", error=UntrustedCodeError)
    trust.trust("evilmod:Env")
    check_trusted("evilmod:Env")
    assert trusted() == {"evilmod:Env"} and not mark.exists()
    refused(check_trusted, "evilmod:Policy", error=UntrustedCodeError)


def test_a_workers_order_is_in_a_folder_of_its_owner_only() -> None:
    cfg = OnlineDataEngineCfg("data_tasks:Toy", {}, buffer_size=2, max_episode_steps=50)
    with OnlineDataEngine(cfg) as engine:
        assert engine._supervisor is not None
        folder = engine._supervisor.folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "buffer").stat().st_mode) == 0o600
