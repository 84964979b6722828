"""Host environments that fail: what it costs, what is reported, what can be played again."""

import io
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from case_tables import cases, refused
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from host_tasks import Drift, Linear, SameArrays, Wrapped
from ladder import Ladder
from tiny import tiny

from ejax.collectors import HostCollector
from ejax.config import parse_config
from ejax.envs.adapters.gymnasium import GymnasiumVector, vectorize
from ejax.envs.host.guarded import GuardedEnv, HostEnvError
from ejax.envs.host.pure_host import PureHostEnv
from ejax.numerics.finite import name_nonfinite
from ejax.play import replay
from ejax.run import train
from ejax.schema.trust import trust
from ejax.training.environments import make_env
from ejax.types import HostEnv

SEED = np.array([3, 5, 7], np.uint32)
CALM = np.zeros((3, 2), np.float32)
CALM[:, 0] = 0.25
RECIPE: dict[str, Any] = {"id": "ladder:Ladder", "cfg": {"fall": 99, "limit": 50, "brittle": 2.0}}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., GuardedEnv]]:
    """Yield a maker of guarded ladders whose episodes have begun; all are closed in the end."""
    trust("ladder:Ladder")
    with ExitStack() as stack:

        def start(folder: Path = tmp_path, cfg: Any = RECIPE["cfg"], **limits: int) -> GuardedEnv:
            make = partial(make_env, RECIPE["id"], cfg, num_envs=3)
            env = stack.enter_context(closing(GuardedEnv(make(), make, recipe=RECIPE, folder=folder, **limits)))
            env.reset(SEED)
            return env

        yield start


def wild(row: int, value: float) -> np.ndarray:
    action = CALM.copy()
    action[row, 0] = value
    return action


def test_a_nan_costs_its_row_an_episode_and_the_others_nothing(guarded: Any, tmp_path: Path) -> None:
    env, sound = guarded(), guarded()
    before = [env.step(CALM) for _ in range(3)][-1]
    for _ in range(3):
        sound.step(CALM)
    told, expected = env.step(wild(1, 5.0)), sound.step(CALM)  # 0.75 + 5 is more than it bears
    assert told.info["valid"].tolist() == [True, False, True]
    assert told.truncated.tolist() == [False, True, False] and not told.terminated.any()
    assert told.reward.tolist() == [0.25, 0.0, 0.25]
    np.testing.assert_array_equal(told.final_obs[1], before.obs[1])
    assert told.obs[1, 1] == 0.0  # a new episode
    for leaf, other in zip(jax.tree.leaves(told), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[[0, 2]], np.asarray(other)[[0, 2]])
    assert env.num_quarantined == 1
    assert env.reports() == [
        f"quarantined row 1 of env 'ladder:Ladder' at its step 4: not finite: reward nan; replay it with "
        f"ejax replay {tmp_path / 'step4_row1.npz'} --trust ladder:Ladder"
    ]
    assert env.reports() == []


@pytest.mark.parametrize("way", ["a link", "a file in the way"])
def test_steps_that_cannot_be_kept_cost_a_line_and_go_through_no_link(way: str, guarded: Any, tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    run.mkdir()
    theirs.mkdir()
    (run / "quarantine").symlink_to(theirs) if way == "a link" else (run / "quarantine").write_text("")
    env = guarded(run / "quarantine" / "eval")
    for action in (CALM, wild(2, 9.0)):
        found = env.step(action)
    assert found.info["valid"].tolist() == [True, True, False] and env.num_quarantined == 1
    not_written, quarantined = env.reports()
    assert str(run / "quarantine") in not_written and "it cannot be replayed" in quarantined
    assert not list(theirs.iterdir())


def test_the_file_plays_again_to_the_recorded_step(
    guarded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = guarded()
    for action in [CALM, wild(2, 9.0), CALM, wild(1, 0.5), wild(2, 1.5), wild(2, 1.5)]:
        env.step(action)
    env.close()
    first, second = sorted(tmp_path.glob("*.npz"))  # row 2 broke at step 2; its next episode at step 6
    assert (first.name, second.name) == ("step2_row2.npz", "step6_row2.npz")
    assert replay.main([str(second), "--trust", "ladder:Ladder"]) == 0
    out = capsys.readouterr().out
    assert "4 recorded steps" in out
    assert "not finite at step 4: reward nan" in out and "this is the recorded step" in out

    facts, actions, _ = replay.read(second)
    assert replay.replay(facts, 0 * actions) is None
    assert replay.replay(facts, actions + 1.0) == (2, "reward nan")


@pytest.mark.usefixtures("nothing_trusted")
def test_a_file_alone_does_not_start_foreign_code(
    guarded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = guarded()
    env.step(wild(0, 9.0))
    env.close()
    monkeypatch.setattr("ejax.schema.trust._named", set())  # another process
    assert replay.main([str(tmp_path / "step1_row0.npz")]) == 2
    told = capsys.readouterr().err
    assert "'ladder:Ladder' (found in " in told
    assert "is code that a file alone may not start; if you know it, add --trust ladder:Ladder" in told
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    assert replay.main([str(tmp_path / "other.npz")]) == 2
    assert "not a file of ejax's quarantine: it has x" in capsys.readouterr().err
    np.savez(tmp_path / "pickled.npz", facts=np.array([{}], object), actions=np.zeros(3))
    assert replay.main([str(tmp_path / "pickled.npz")]) == 2
    assert "allow_pickle=False" in capsys.readouterr().err


def write_quarantined(file: Path, actions: bytes) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        buffer = io.BytesIO()
        np.save(buffer, np.array("[" * 100_000))
        archive.writestr("facts.npy", buffer.getvalue())
        archive.writestr("actions.npy", actions)


def test_files_that_are_none_of_quarantine_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "_MAX_UNPACKED", 1 << 20)
    (tmp_path / "empty").touch()
    np.save(tmp_path / "array.npy", np.zeros(3))
    huge = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846, 4), }"
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(huge).to_bytes(2, "little") + huge)
    write_quarantined(tmp_path / "deep.npz", b"")
    write_quarantined(tmp_path / "bomb.npz", bytes(2 << 20))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "deep.npz").read_bytes()[:-30])
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    os.mkfifo(tmp_path / "pipe")
    for file in (*sorted(tmp_path.iterdir()), Path("/dev/null"), Path("/dev/zero"), tmp_path, Path("x" * 300)):
        assert replay.main([str(file)]) == 2, file
        error = capsys.readouterr().err
        assert error.startswith("ejax replay: ") and error.count("\n") == 1
        assert str(file) in error, error


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_quarantine_in_modes_that_reset_by_themselves(tmp_path: Path, mode: AutoresetMode) -> None:
    def make() -> HostEnv:
        return GymnasiumVector(SyncVectorEnv([partial(Ladder, fall=99, limit=4, brittle=2.0)] * 3, autoreset_mode=mode))

    env = GuardedEnv(make(), make, recipe=RECIPE, folder=tmp_path)
    env.reset(SEED)
    actions = [CALM, wild(1, 9.0), CALM, wild(0, 9.0), CALM, CALM, CALM]  # row 0 breaks in an episode's last step
    steps = [env.step(action) for action in actions]
    assert all(np.isfinite(leaf).all() for t in steps for leaf in (t.obs, t.final_obs, t.reward))
    assert (~steps[1].info["valid"]).tolist() == [False, True, False]
    assert not steps[3].info["valid"][0] and steps[3].truncated[0]
    heights = [told.final_obs[1, 1] for told in steps if told.info["valid"][1]]
    assert heights[:5] == [1.0, 1.0, 2.0, 3.0, 4.0]
    facts = json.loads(str(np.load(tmp_path / "step2_row1.npz")["facts"]))
    assert not facts["seeded"]
    refused(replay.read, tmp_path / "step2_row1.npz", match="does not seed its episodes one by one")
    assert "cannot be replayed: the environment does not seed rows one by one" in env.reports()[0]


def test_too_many_end_the_training_with_the_name_of_a_file(guarded: Any) -> None:
    env = guarded(max_quarantined=1)
    env.step(wild(0, 9.0))
    with pytest.raises(HostEnvError, match=r"in 2 episodes, allowed are 1 \(trainer\.collector.*step2_row2\.npz"):
        env.step(wild(2, 9.0))


def test_two_groups_do_not_overwrite_each_others_files(guarded: Any, tmp_path: Path) -> None:
    for _ in range(2):
        guarded().step(wild(0, 9.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step1_row0.npz", "step1_row0_2.npz"]


def test_an_episode_that_began_before_what_is_kept_is_not_played_again(guarded: Any, tmp_path: Path) -> None:
    env = guarded()
    env.adopt(env.reset(SEED))
    env.step(wild(0, 9.0))
    (report,) = env.reports()
    assert "cannot be replayed: the episode began before the first of them" in report
    assert "ejax replay" not in report
    env.close()
    refused(replay.read, tmp_path / "step1_row0.npz", match="its episode began before what it holds")


class Former(Ladder):
    """An environment of gym's first API."""

    def reset(self, **options: Any) -> Any:
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, {}


class Seedless(Former):
    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32)


class Optionless(Former):
    def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
        return np.zeros(2, np.float32), {}


class FourValues(Former):
    def reset(self, **options: Any) -> Any:
        return np.zeros(2, np.float32), {}


@cases(
    "make found",
    (Seedless, r"reset\(\).* argument 'seed'"),
    (Optionless, r"reset\(\).* argument 'options'"),
    (Former, r"Former\.reset\(\) returns a ndarray alone"),
    (FourValues, r"FourValues\.step\(\) returns 4 values"),
    (lambda: TimeLimit(FourValues(), 10), r"expected 5, got 4\)"),
)
def test_gyms_former_api_is_named_with_the_form_of_today(make: Any, found: str) -> None:
    env = vectorize(make(), make, 2)
    with pytest.raises(ValueError, match=rf"{found}: .*shimmy"):
        env.reset(SEED[:2])
        env.step(np.zeros((2, 2)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_named(value: float) -> None:
    scan = np.ones((2, 3), np.float32)
    scan[1, 2] = scan[0, 0] = value
    found = name_nonfinite({"reward": np.float32(1.0), "obs": {"scan": scan, "count": np.array([2])}})
    assert found == f"obs/scan[0, 0] {value}, obs/scan[1, 2] {value}"
    assert name_nonfinite({"obs": np.full(9, value)}, 1) == f"obs[0] {value} and 8 more"
    assert name_nonfinite({"obs": np.ones(3)}) == ""


def test_a_start_that_is_not_finite_is_an_error(guarded: Any, tmp_path: Path) -> None:
    with pytest.raises(HostEnvError, match=r"not finite, 3 times in a row, rows \[0, 1, 2\], after 0 steps.* nan"):
        guarded(cfg={"first_nan": True})


def test_what_was_seen_before_is_kept_though_the_environment_reuses_its_arrays(tmp_path: Path) -> None:
    env = GuardedEnv(SameArrays(sound=3), SameArrays, recipe=RECIPE, folder=tmp_path)
    env.reset(SEED)
    for _ in range(3):
        env.step(CALM)
    told = env.step(CALM)
    assert (told.final_obs == 3.0).all() and (told.obs == 100.0).all()


def test_an_exception_names_the_environment_and_the_step(guarded: Any) -> None:
    env = guarded()
    env.step(CALM)
    with pytest.raises(HostEnvError, match=r"'ladder:Ladder' raised at its step 2 \(3 rows\).*the ladder broke") as e:
        env.step(wild(0, 10.0))
    assert isinstance(e.value.__cause__, RuntimeError)


def test_an_environment_that_raised_is_made_anew_as_often_as_allowed(guarded: Any) -> None:
    env = guarded(max_restarts=1)
    before = env.step(CALM)
    told = env.step(wild(0, 10.0))
    assert not told.info["valid"].any() and told.truncated.all() and not told.reward.any()
    np.testing.assert_array_equal(told.final_obs, before.obs)
    assert (told.obs[:, 1] == 0.0).all()
    assert env.step(CALM).info["valid"].all()
    assert "recreated, 1 of 1 times" in env.reports()[0]
    refused(lambda: env.step(wild(0, 10.0)), match="may be recreated 1 times", error=HostEnvError)


def test_one_that_raises_at_once_is_not_made_anew(guarded: Any) -> None:
    env = guarded(max_restarts=5)
    refused(lambda: env.step(wild(0, 10.0)), match="at its step 1", error=HostEnvError)


class Unmakeable(Wrapped):
    def before(self) -> None:
        if self.num_steps == 1:
            raise OSError("gone")


def test_one_that_cannot_be_made_again_or_reset_says_so(tmp_path: Path) -> None:
    def make() -> HostEnv:
        raise OSError("the simulator is not there")

    env = GuardedEnv(Unmakeable(PureHostEnv(Drift(), 3)), make, recipe=RECIPE, folder=tmp_path, max_restarts=1)
    env.reset(SEED)
    env.step(CALM[:, :1])
    refused(env.step, CALM[:, :1], match=r"gone.*recreating it failed.*the simulator is not there", error=HostEnvError)


def test_reports_are_taken_by_another_thread_without_loss(guarded: Any) -> None:
    env = guarded(max_quarantined=1000)
    told: list[str] = []
    finished = threading.Event()

    def take() -> None:
        while not finished.is_set():
            told.extend(env.reports())

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(60):
        env.step(wild(0, 9.0))
    finished.set()
    thread.join()
    assert len(told) + len(env.reports()) == env.num_quarantined >= 60


def test_guarded_environments_are_saved_where_those_inside_can_be(tmp_path: Path) -> None:
    make = partial(PureHostEnv, Drift(), 3)
    groups = [GuardedEnv(make(), make, recipe=RECIPE, folder=tmp_path) for _ in range(2)]
    first, second = (HostCollector(Linear(), [each], num_steps=4, seed=0) for each in groups)
    params = Linear().init(jax.random.key(0), None)
    second.restore(first.collect(params, jax.random.key(0), index=0).envs)
    a, b = (each.collect(params, jax.random.key(1), index=1) for each in (first, second))
    chex.assert_trees_all_equal(a.rollout, b.rollout)
    assert a.facts == {"collector/quarantined": 0.0, "collector/env_restarts": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "async"])
def test_a_run_goes_on_through_nans_and_exceptions_and_counts_them(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collector = {"mode": mode, "max_env_restarts": 1000, "num_groups": 2}
    cfg = {"fall": 99, "limit": 12, "brittle": 1.0}
    ppo = {"skip_nonfinite_updates": False}
    trainer = {"iterations": 12, "collector": collector, "console": True}
    result = train(parse_config(tiny(tmp_path, "ladder:Ladder", env_cfg=cfg, ppo=ppo, **trainer)))
    assert result.finished
    last = result.last_train_metrics
    files = list((result.run_dir / "quarantine").glob("*.npz"))
    counts = [entry["collector/quarantined"] for entry in result.train_history]
    assert counts == sorted(counts) and last["collector/quarantined"] > 0
    assert len(files) >= last["collector/quarantined"]  # a thread may be ahead
    assert last["collector/env_restarts"] >= 0
    assert "ejax replay" in capsys.readouterr().out
