"""The policy of a finished run: loaded, evaluated and recorded."""

import inspect
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.envs.host.calls import closing
from ejax.envs.mujoco.drawing import choose_opengl
from ejax.episodes import UNLIMITED, episodes, record_episodes
from ejax.evaluation import count_episodes, evaluate, evaluate_host, evaluation_notes, summarize
from ejax.logs.console import working
from ejax.runtime.device import matmul_precision, prepare_jax
from ejax.runtime.video import tile_frames, write_video
from ejax.schema.messages import explain
from ejax.schema.plain_files import to_json
from ejax.schema.registry import is_import_path, resolve
from ejax.schema.writing import by_product, replace_file
from ejax.store.checkpoint import load_params, verify_checkpoint
from ejax.store.run_dir import RunDirectory, open_policy_run
from ejax.training.environments import build_env, sample_obs
from ejax.training.policies import make_policy
from ejax.training.recorder import draw_episodes
from ejax.training.watchdog import guarded_calls
from ejax.types import ChunkedEnv, Env, HostEnv, Key, Params, Policy, RenderableEnv, RenderableHostEnv

_FILMED = 4
"""Episodes of a video, side by side."""


def evaluate_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    member: int | None = None,
    checkpoint: str | None = None,
    num_episodes: int = 100,
    num_envs: int = 32,
    choice: Literal["fixed", "first_finished"] = "fixed",
    seed: int | None = None,
    samples: bool = False,
    device: str = "cpu",
    video: Path | None = None,
    gait: bool = False,
    shown: Callable[[Mapping[str, object]], object] = lambda metrics: None,
) -> dict[str, object]:
    """Evaluate a checkpoint of a run and write ``<run>/evaluations/<checkpoint>.json``.

    Args:
        run: its folder, or a policy that comes with ejax, of which the file is in ``outputs/<name>/evaluations``.
        overrides: ``env.key=value``: another environment than that of the training, named in the file's name.
        member: of a population. None: the best one.
        checkpoint: ``best``, ``latest`` or a path. None: the best one, or the latest where none is the best.
        choice: which episodes count, see ``ejax.evaluation.evaluate``.
        seed: of the start states. None: the run's ``eval_seed``.
        samples: act by samples of the policy's distribution, as in training; the file's name says so.
        video: also record four episodes into this file.
        gait: also measure the gait card of a legged robot, ``ejax.play.gait``: ``gait`` in the file and the result.
        shown: gets the metrics as soon as they are there, before anything is written.

    Returns:
        The metrics under EmbodiChain's tags, the checkpoint and what was written; ``no video``: why there is none.

    Raises:
        FileNotFoundError: ``run`` is not a run. CheckpointError: no such checkpoint, or a damaged one.
        ValueError: a count that is not positive.
        ConfigError: an override that is not of the environment, or that it refuses.
    """
    opened = opened_policy(run, overrides, member=member, checkpoint=checkpoint, device=device)
    with opened as (directory, config, path):
        quarantine = directory.results / "quarantine" / "eval"
        # a row plays one of the fixed episodes after the other: more rows than episodes would idle
        slots = min(num_envs, num_episodes) if choice == "fixed" else num_envs
        env = build_env(config, phase="eval", num_envs=slots, quarantine=quarantine)
        policy, params = restore_policy(config, env, path)
        first_seed = config.trainer.eval_seed if seed is None else seed
        options: Any = {"num_episodes": num_episodes, "choice": choice, "samples": samples}
        with working(f"{num_episodes:,} episodes of {config.env.id}"):
            if isinstance(env, HostEnv):
                with closing(env):
                    played = evaluate_host(policy, env, params, first_seed, **options)
            else:
                key = jax.random.key(first_seed)
                played = jax.block_until_ready(evaluate(policy, env, params, key, num_envs=num_envs, **options))
        metrics: dict[str, object] = {name: float(x) for name, x in sorted(summarize(played).items())}
        for text in evaluation_notes(metrics, num_episodes):
            print(f"ejax evaluate: {text}", file=sys.stderr)
        metrics |= {"episodes": count_episodes(metrics, num_episodes), "checkpoint": str(path)}
        # with a digest: evaluations elsewhere do not overwrite each other
        words, digest = re.sub(r"[^\w.+-]+", "-", "_".join(overrides))[:40], zlib.crc32(repr([*overrides]).encode())
        name = f"{path.name}_{words}-{digest:08x}" if overrides else path.name
        name += "_samples" if samples else ""
        report = directory.results / "evaluations" / f"{name}.json"
        shown(metrics)
        per_episode = {name: np.asarray(x).tolist() for name, x in played.items()}
        if gait and not isinstance(env, HostEnv):
            from ejax.play.gait import measure_gait  # legs, which most runs do not have

            if card := measure_gait(config, policy, params, seed=first_seed):
                metrics["gait"] = card
        facts = {**metrics, "seed": seed, "samples": samples, "overrides": list(overrides), "per_episode": per_episode}
        with by_product("the report of these numbers"):
            replace_file(report, to_json(facts, indent=2), directory.results)
            metrics["report"] = report
        if video is not None:
            with working(f"filming {video}"):
                metrics |= _try_to_record(config, policy, env, params, first_seed, video, quarantine)
        return metrics


@contextmanager
def opened_policy(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    member: int | None = None,
    checkpoint: str | None = None,
    device: str = "cpu",
    command: str = "ejax evaluate",
) -> Iterator[tuple[RunDirectory, RunConfig, Path]]:
    """Open a run for its policy: its folder, its config with the overrides, and the checkpoint.

    Inside, calls into environments are bounded, and products are as precise as the run's. Errors: as ``evaluate_run``.
    """
    directory, config = open_policy_run(run, member)
    prepare_jax(device)
    config = elsewhere(config, overrides)
    trainer = config.trainer
    with guarded_calls(config.env.id, trainer.collector), matmul_precision(trainer.matmul_precision, device):
        yield directory, config, chosen_checkpoint(directory, checkpoint, command)


def elsewhere(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Apply overrides to a config. ConfigError: one is not of ``env``."""
    for text in overrides:
        if not text.startswith("env."):
            raise ConfigError([Problem(text, "can change env.… only, such as env.cfg.episode_length=50")])
    return parse_untrusted(config.to_dict(), overrides) if overrides else config


def _try_to_record(
    config: RunConfig, policy: Policy, env: Env | HostEnv, params: Params, seed: int, video: Path, quarantine: Path
) -> dict[str, object]:
    """Record a video: its path, or the reason why there is none."""
    # beyond that, an episode without a limit is filmed in part
    part = {} if env.max_episode_steps else {"video shows": "1,000 steps at most; the episodes have no time limit"}
    try:
        if not isinstance(env, HostEnv):
            return {"video": record_video(policy, env, params, jax.random.key(seed), video), **part}
        drawn: Any = build_env(filmed(config), phase="eval", num_envs=_FILMED, quarantine=quarantine)
        with closing(drawn):
            frames = film_host(policy, drawn, params, seed)
            return {"video": write_video(video, frames, drawn.frames_per_second), **part}
    except Exception as error:  # of any kind: the metrics are there
        return {"no video": explain(error, typed=True)}


def chosen_checkpoint(directory: RunDirectory, which: str | None, command: str) -> Path:
    """Find the checkpoint that ``which`` names, as ``RunDirectory.find`` takes it, or a path. CheckpointError: there is
    none, or it is damaged."""
    if which in (None, "best", "latest"):
        return directory.find(which, lambda text: print(f"{command}: {text}", file=sys.stderr))
    verify_checkpoint(Path(which))
    return Path(which)


def filmed(config: RunConfig) -> RunConfig:
    """Have the environment drawn, where Gymnasium needs to know so when it is made."""
    if "render_mode" in config.env.cfg:
        return config
    # the registered ones draw without it; of other factories the signature decides
    takes_mode = config.env.id.startswith("gymnasium:")
    if not takes_mode and is_import_path("env", config.env.id):
        takes_mode = "render_mode" in inspect.signature(resolve("env", config.env.id)).parameters
    if not takes_mode:
        return config
    choose_opengl()
    return elsewhere(config, ["env.cfg.render_mode=rgb_array"])


def restore_policy(config: RunConfig, env: Env | HostEnv, checkpoint: Path) -> tuple[Policy, Params]:
    policy = make_policy(config.policy, env)
    # shapes suffice to load by, and cost no compilation
    like = jax.eval_shape(lambda: policy.init(jax.random.key(0), sample_obs(env, 1)))
    return policy, load_params(checkpoint, like)


def record_video(policy: Policy, env: Env, params: Params, key: Key, path: Path, *, num_envs: int = _FILMED) -> Path:
    """Record episodes side by side, until the last has ended. ValueError: the environment cannot be drawn."""
    if not isinstance(env, RenderableEnv):
        raise ValueError(f"{type(env).__name__} cannot be recorded: it has no render(state, width=…, height=…)")
    states, done = record_episodes(policy, env, params, key, num_envs=num_envs)
    # a chunk is filmed action by action
    per_decision = env.actions_per_decision if isinstance(env, ChunkedEnv) else 1
    fps = per_decision / env.control_period
    return write_video(path, draw_episodes(env, states, done, (480, 360)), fps=fps)


def film_host(policy: Policy, env: RenderableHostEnv, params: Params, seed: int) -> Iterator[NDArray[np.uint8]]:
    """Film one episode in each row, side by side, until the last has ended; one that ended stands still."""
    ended, pictures = np.zeros(env.num_envs, bool), np.zeros((), np.uint8)
    for made in itertools.islice(episodes(policy, env, params, seed), 1 + (env.max_episode_steps or UNLIMITED)):
        if made.timestep is not None:
            ended |= made.timestep.terminated | made.timestep.truncated
        if ended.all():
            return
        # a row that ended keeps its last picture while the others play on
        pictures = np.where(ended[:, None, None, None], pictures, env.pictures())
        yield tile_frames(pictures)
