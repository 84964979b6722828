"""A host environment whose failures cost an episode instead of a training, up to a stated number.

A row that gives a NaN or an infinity is quarantined: its step is not a transition (``info["valid"]`` False), its
episode is over, a new one starts, and its steps go to a file for ``ejax replay``. An environment that
raises can be recreated, which ends the episodes of all its rows.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.envs.description import EnvDescription, describe
from ejax.envs.host.answers import check_host_obs, check_info, check_timestep
from ejax.envs.host.calls import HostEnvError, call_env, short_error
from ejax.envs.host.rows import choose_rows
from ejax.numerics.finite import finite_rows, name_nonfinite
from ejax.schema.plain_files import to_json
from ejax.schema.trust import trust_options
from ejax.schema.writing import by_product, new_file
from ejax.types import HostEnv, HostTimestep, PyTree, RenderableHostEnv, ReportingHostEnv

_MAX_ACTIONS = 10_000  # steps of an episode that a replay file can hold
_RESET_ATTEMPTS = 3
_REMEDY = "let the environment return a number instead, such as a sensor's largest range where it saw nothing"


class GuardedEnv:
    """Environments whose failures are bounded; owned, and closed, by this object.

    Args:
        make: recreates ``env`` after it raised.
        recipe: the origin of ``make``, ``{"id": …, "cfg": …}``: part of a replay file.
        folder: for replay files.
        max_quarantined: rows that may be quarantined. max_restarts: times that ``make`` may be called again.
    Raises HostEnvError: from ``reset`` and ``step``, once a number is used up.
    """

    def __init__(
        self,
        env: HostEnv,
        make: Callable[[], HostEnv],
        *,
        recipe: Mapping[str, Any],
        folder: Path,
        max_quarantined: int = 100,
        max_restarts: int = 0,
    ) -> None:
        self._make, self._recipe, self._folder = make, dict(recipe), folder
        self._max_quarantined, self._max_restarts = max_quarantined, max_restarts
        self._env = env
        self.name = str(recipe["id"])
        self.num_steps = self.num_quarantined = self.num_restarts = 0
        self._actions: deque[NDArray[Any]] = deque(maxlen=_MAX_ACTIONS)  # of the last steps
        self._began = np.zeros(self.num_envs, np.int64)  # ``num_steps`` when each row's episode began
        self._info: dict[str, Any] = {}  # ``info`` of the last step
        self._form: Any = None  # of the environment's own ``info``
        self._obs: PyTree = None
        self._reports: deque[str] = deque()  # added to in the thread that steps, taken by another

    inner: Any = property(attrgetter("_env"))
    num_envs: Any = property(attrgetter("_env.num_envs"))
    observation_space: Any = property(attrgetter("_env.observation_space"))
    action_space: Any = property(attrgetter("_env.action_space"))
    max_episode_steps: Any = property(attrgetter("_env.max_episode_steps"))
    seeds_rows: Any = property(attrgetter("_env.seeds_rows"))
    row_seed: Any = property(attrgetter("_env.row_seed"))
    frames_per_second: Any = property(attrgetter("_drawn.frames_per_second"))

    @property
    def description(self) -> EnvDescription:
        return describe(self._env)

    def reset(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None = None) -> PyTree:
        obs = self._reset_inner(seed, rows)
        chosen = np.ones(self.num_envs, bool) if rows is None else rows
        self._began = np.where(chosen, self.num_steps, self._began)
        self._keep(self._finite_start(obs, chosen))
        return self._obs

    def adopt(self, obs: PyTree) -> None:
        """Go on with episodes that began elsewhere: after ``set_state`` of the environment inside."""
        self._began = np.full(self.num_envs, -1)  # before the first of ``_actions``
        self._keep(obs)

    def step(self, action: NDArray[Any]) -> HostTimestep:
        self.num_steps += 1
        before, seed = self._obs, self.row_seed.copy()
        self._actions.append(np.array(action))
        try:
            timestep = call_env(self.name, "step", self._env.step, action)
            check_timestep(timestep, self.observation_space, self.num_envs)
            self._form = check_info(timestep.info, self.num_envs, self._form)
        except Exception as error:
            return self._restart(error, before)
        valid = timestep.info.get("valid", np.ones(self.num_envs, bool))
        broken = ~finite_rows(timestep.final_obs, timestep.reward, numpy=np) & valid
        done = timestep.terminated | timestep.truncated
        obs, final_obs = timestep.obs, timestep.final_obs
        if broken.any():
            self._quarantine(broken, seed, timestep)
            # a broken row that ended has been reset by the environment itself
            forced = broken & ~(done & finite_rows(obs, numpy=np))
            if forced.any():
                obs = self._reset_inner(_new_seeds(seed, self.num_steps), forced)
            final_obs = choose_rows(broken, before, final_obs)
            timestep = replace(
                timestep,
                reward=np.where(broken, 0.0, timestep.reward).astype(np.float32),
                terminated=timestep.terminated & ~broken,
                truncated=timestep.truncated | broken,
                info=_blank_rows(broken, timestep.info),
            )
        started = done | broken | ~valid
        if started.any():
            obs = self._finite_start(obs, started)
            final_obs = choose_rows(~valid, obs, final_obs)
        self._began = np.where(started, self.num_steps, self._began)
        self._info = {**timestep.info, "valid": valid & ~broken, "nonfinite": broken}
        self._keep(obs)
        return replace(timestep, obs=self._obs, final_obs=final_obs, info=self._info)

    def pictures(self) -> NDArray[np.uint8]:
        """Draw every row: [N, height, width, 3] RGB. Raises ValueError: the environment cannot be drawn."""
        return call_env(self.name, "pictures", self._drawn.pictures)

    def reports(self) -> list[str]:
        """Return the messages since the last call."""
        inner = self._env.reports() if isinstance(self._env, ReportingHostEnv) else []
        return inner + [self._reports.popleft() for _ in range(len(self._reports))]

    def close(self) -> None:
        """Close the environment inside. Raises HostEnvError: it raised, or did not return in time."""
        try:
            call_env(self.name, "close", self._env.close)
        except HostEnvError:
            raise
        except Exception as error:
            raise HostEnvError(f"env '{self.name}' failed to close: {short_error(error)}") from error

    @property
    def _drawn(self) -> RenderableHostEnv:
        if not isinstance(self._env, RenderableHostEnv):
            raise ValueError(f"{self.name} cannot be shown: nothing draws it (docs/play.md)")
        return self._env

    def _keep(self, obs: PyTree) -> None:
        self._obs = jax.tree.map(np.array, obs)

    def _reset_inner(self, seed: NDArray[np.uint32], rows: NDArray[np.bool_] | None) -> PyTree:
        try:
            obs = call_env(self.name, "reset", self._env.reset, seed, rows)
            check_host_obs(obs, self.observation_space, (self.num_envs,))
            return obs
        except Exception as error:
            where = f"env '{self.name}' failed to reset after {self.num_steps} steps"
            raise HostEnvError(f"{where}: {short_error(error)}") from error

    def _quarantine(self, broken: NDArray[np.bool_], seed: NDArray[np.uint32], timestep: HostTimestep) -> None:
        """Write a replay file for each broken row. Raises HostEnvError: more rows than allowed."""
        for row in np.flatnonzero(broken):
            self.num_quarantined += 1
            length = self.num_steps - int(self._began[row])
            facts = {
                "recipe": self._recipe,
                "seed": int(seed[row]),
                "seeded": self.seeds_rows,
                "complete": length <= len(self._actions),
                "step": self.num_steps,
                "row": int(row),
                "reward": float(timestep.reward[row]),
            }
            actions = np.stack([each[row] for each in self._actions][-length:])
            last = {f"obs/{i}": np.asarray(leaf)[row] for i, leaf in enumerate(jax.tree.leaves(self._obs))}
            broke = {f"final_obs/{i}": leaf[row] for i, leaf in enumerate(jax.tree.leaves(timestep.final_obs))}
            path, name = "", f"step{self.num_steps}_row{row}"
            with by_product("what led there", self._reports.append), _new_file(self._folder, name) as file:
                np.savez_compressed(file, facts=to_json(facts), actions=actions, **last, **broke)
                path = file.name
            command = f"ejax replay {path}{trust_options(self._recipe)}"
            remedy = f"replay it with {command}" if path else "it cannot be replayed"
            if path and not (facts["seeded"] and facts["complete"]):
                late = "the episode began before the first of them"
                why = late if facts["seeded"] else "the environment does not seed rows one by one"
                remedy = f"its steps are in {path}, but cannot be replayed: {why}"
            where = f"row {row} of env '{self.name}' at its step {self.num_steps}"
            found = {"reward": timestep.reward, "obs": timestep.final_obs}
            last_one = name_nonfinite(jax.tree.map(lambda x, row=row: x[row], found))
            self._reports.append(f"quarantined {where}: not finite: {last_one}; {remedy}")
        if self.num_quarantined > self._max_quarantined:
            text = f"gave values that are not finite in {self.num_quarantined} episodes, allowed are"
            limit = f"{self._max_quarantined} (trainer.collector.max_quarantined), within {self.num_steps} steps"
            raise HostEnvError(f"env '{self.name}' {text} {limit}; the last one: {last_one}, {path}; {_REMEDY}")

    def _restart(self, error: Exception, before: PyTree) -> HostTimestep:
        where = f"env '{self.name}' raised at its step {self.num_steps} ({self.num_envs} rows): {short_error(error)}"
        if self.num_restarts >= self._max_restarts or not self._info:  # with no step taken it would only fail again
            text = f"It may be recreated {self._max_restarts} times (trainer.collector.max_env_restarts)"
            raise HostEnvError(f"{where}. {text}") from error
        self.num_restarts += 1
        self._reports.append(f"{where}; recreated, {self.num_restarts} of {self._max_restarts} times")
        with suppress(Exception):  # it is broken: an error on closing adds nothing
            call_env(self.name, "close", self._env.close)
        try:
            self._env = call_env(self.name, "make", self._make)
        except Exception as again:
            raise HostEnvError(f"{where}; recreating it failed: {short_error(again)}") from again
        # other seeds than the first time: it might raise at the same step again
        obs = self.reset(_new_seeds(np.arange(self.num_envs, dtype=np.uint32), self.num_steps))
        nothing = np.zeros(self.num_envs, bool)
        return HostTimestep(
            obs=obs,
            reward=np.zeros(self.num_envs, np.float32),
            terminated=nothing,
            truncated=~nothing,
            info=_blank_rows(~nothing, self._info) | {"valid": nothing},
            final_obs=before,
        )

    def _finite_start(self, obs: PyTree, rows: NDArray[np.bool_]) -> PyTree:
        """Reset again the rows whose first observation is not finite. Raises HostEnvError: they stay so."""
        for attempt in range(_RESET_ATTEMPTS + 1):
            broken = rows & ~finite_rows(obs, numpy=np)
            if not broken.any():
                return obs
            if attempt < _RESET_ATTEMPTS:
                obs = self._reset_inner(_new_seeds(self.row_seed, self.num_steps + attempt), broken)
        text = f"starts with observations that are not finite, {_RESET_ATTEMPTS} times in a row"
        numbers = np.flatnonzero(broken).tolist()
        where = f"rows {numbers}, after {self.num_steps} steps"
        last_one = name_nonfinite({"obs": jax.tree.map(lambda x: x[numbers[0]], obs)})
        raise HostEnvError(f"env '{self.name}' {text}, {where}; of row {numbers[0]} {last_one}; {_REMEDY}")


def _new_file(folder: Path, stem: str) -> IO[bytes]:
    """Open ``<stem>.npz``, or ``<stem>_2.npz`` and so on where the name is taken."""
    number, name = 1, f"{stem}.npz"
    run = next((each.parent for each in (folder, folder.parent) if each.name == "quarantine"), folder)
    while True:
        try:  # of several runs and groups in one folder, one makes each name
            return new_file(folder / name, run)
        except FileExistsError:
            number += 1
            name = f"{stem}_{number}.npz"


def _blank_rows(rows: NDArray[np.bool_], info: dict[str, Any]) -> dict[str, Any]:
    return choose_rows(rows, jax.tree.map(lambda x: np.zeros((), np.asarray(x).dtype), info), info)


def _new_seeds(seed: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    return np.random.SeedSequence([*seed.tolist(), count]).generate_state(len(seed)).astype(np.uint32)
