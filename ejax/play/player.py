"""One environment played step by step, to be looked at: in MuJoCo's viewer, or in a video."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.episodes import UNLIMITED, episodes
from ejax.evaluation import summarize
from ejax.runtime.video import tile_frames
from ejax.types import Env, HostEnv, Params, Policy, PyTree, RenderableHostEnv


class StepRecord(NamedTuple):
    """The frames after a decision, or at the start of an episode, and the decision's outcome."""

    frames: tuple[PyTree, ...]
    """States of one environment after each of the decision's actions; outside JAX its picture. NumPy."""
    reward: float = 0.0
    starts: bool = False
    ended: bool = False
    finite: bool = True
    facts: Mapping[str, float] = {}
    """``success`` and ``metrics/<name>``, where the environment reports them."""
    obs: PyTree = None
    """In JAX: the observation before the decision, and ``action``, which the environment was given then. NumPy."""
    action: PyTree = None


def play_episodes(
    policy: Policy,
    env: Env | RenderableHostEnv,
    params: Params,
    seed: int,
    *,
    samples: bool = False,
    patch: Callable[[PyTree], PyTree] = lambda state: state,
) -> Iterator[StepRecord]:
    """Play one row, episode after episode, without an end: the episodes of ``ejax.evaluate --num-envs 1`` by this seed.

    ``patch`` changes the state [1, ...] before each decision, in JAX: a command from the keys, a blow, the mouse.
    """
    for made in episodes(policy, env, params, seed, samples=samples, patch=patch):
        if isinstance(env, HostEnv):
            frames: tuple[PyTree, ...] = (env.pictures()[0],)
        else:
            states = jax.tree.map(lambda x: x[:, 0], jax.device_get(made.states))
            frames = tuple(jax.tree.map(lambda x, i=i: x[i], states) for i in range(len(jax.tree.leaves(states)[0])))
        if made.timestep is None or not made.played[0]:
            yield StepRecord(frames, starts=True)
            continue
        row = jax.tree.map(lambda x: x[0], jax.device_get(made._replace(states=(), timestep=())))
        timestep = jax.device_get(made.timestep)
        yield StepRecord(
            frames,
            reward=float(timestep.reward[0]),
            ended=bool((timestep.terminated | timestep.truncated)[0]),
            finite=bool(row.finite),
            facts=_facts(timestep.info),
            obs=row.obs,
            action=row.action,
        )


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


class PlayStats:
    """Counts what is played, and reports each episode's line."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._episodes: list[dict[str, float]] = []
        self._steps: list[StepRecord] = []

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    @property
    def text(self) -> str:
        rewards = [0.0, *(each.reward for each in self._steps)]
        return f"step {len(rewards) - 1}, reward {rewards[-1]:.3g}, return {sum(rewards):.3g}"

    def add(self, step: StepRecord) -> None:
        """Count a step; at an episode's end, report its line."""
        # outside JAX an environment starts again in the step that ends
        if step.starts or (self._steps and self._steps[-1].ended):
            self._steps = []
        if not step.starts:
            # without the states, which would fill the memory in a long episode
            self._steps.append(step._replace(frames=(), obs=None, action=None))
        if step.ended:
            self._end(step.facts)

    def summary(self) -> dict[str, object]:
        """Summarize the episodes that ended, as ``ejax.evaluate`` does, and the part of one that was cut off."""
        cut: dict[str, object] = {}
        if self._steps and not self._steps[-1].ended:
            cut["cut off, not counted"] = self.text
        if not self._episodes:
            return {"episodes": 0, **cut}
        columns = {name: np.array([each[name] for each in self._episodes], np.float32) for name in self._episodes[0]}
        means = {name: float(x) for name, x in sorted(summarize(columns).items())}
        return {**means, "episodes": self.num_episodes, **cut}

    def _end(self, facts: Mapping[str, float]) -> None:
        steps, finite = self._steps, all(each.finite for each in self._steps)
        total = sum((each.reward for each in steps), 0.0)
        episode = {"return": total, "length": len(steps), "nonfinite": not finite, **facts}
        if "success" in facts and not finite:
            # an episode with NaN is not a success, as in ``ejax.evaluation``
            episode["success"] = min(facts["success"], 0.0)
        for name, mean in _TRACKED.items():
            if values := [each.facts[name] for each in steps if name in each.facts]:
                episode[f"metrics/{mean}"] = float(np.mean(values))
        self._episodes.append(episode)
        shown = {name.removeprefix("metrics/"): x for name, x in episode.items() if name != "nonfinite" or not finite}
        text = " ".join(f"{name}={float(value):.4g}" for name, value in shown.items())
        self._report(f"[episode {self.num_episodes}] {text}")


_TRACKED = {
    "metrics/linear_velocity_error": "mean_linear_velocity_error",
    "metrics/yaw_rate_error": "mean_yaw_rate_error",
}
"""Metrics of following a command: at the last step, as every metric, and also over the whole episode."""


def take_until(
    steps: Iterator[StepRecord],
    stats: PlayStats,
    *,
    num_episodes: int | None = None,
    num_actions: int | None = None,
) -> Iterator[PyTree]:
    """Yield the frames, counted, until so many episodes have ended, or so many actions were taken."""
    left = num_actions
    for step in steps:
        stats.add(step)
        for frame in step.frames:
            yield frame
            # an episode's start is seen too, and is not an action
            left = left if left is None or step.starts else left - 1
            if left == 0:
                return
        if num_episodes is not None and stats.num_episodes >= num_episodes:
            return


def _facts(info: Mapping[str, Any]) -> dict[str, float]:
    facts = {f"metrics/{name}": x for name, x in info.get("metrics", {}).items() if jnp.ndim(x) == 1}
    if "success" in info and not np.isnan(info["success"]).any():
        facts["success"] = info["success"]
    return {name: float(x[0]) for name, x in facts.items()}
