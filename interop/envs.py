"""Vector environments of torch as a ``HostEnv``: ``torch:package.module:factory``, or ``torch:FILE.py:factory``.

EmbodiChain's ``LearningVecEnv``, ManiSkill, Isaac Lab and their like: tensors on any device, all rows stepped at once,
rows that ended reset in the same step. Such a name runs the user's own code, so the command line must name it, once
(``ejax.schema.trust``):

    ejax train --config configs/torch/point_mass.yaml \\
        env.id=torch:embodichain_tasks.classic_control.point_mass:PointMassEnv

``success``, ``metrics`` and ``rewards`` of ``info`` are carried over. Terminal observations are looked for in ``info``
under ``FINAL_OBS_KEYS``, or under ``final_obs_key``:

    Gymnasium's vectors, Isaac Lab   ``final_obs`` (Isaac Lab: only with ``compute_final_obs=True`` in its config)
    ManiSkill                        ``final_observation``
    EmbodiChain                      none

Without one, the observation before the step stands in: a cut-off episode's last step bootstraps from the value
of the state it was taken in. That is the rule of EmbodiChain 0.3 and RSL-RL, and one step off; to take the value of the
new episode's first observation instead could be wrong by any amount. It is reported once.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import gymnasium
import jax
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from ejax.envs.actions import action_form, to_action
from ejax.envs.host.rows import as_rows, choose_rows, rows_space
from ejax.schema.frozen import thaw
from ejax.schema.paths import find
from ejax.schema.registry import is_import_path, resolve
from ejax.schema.trust import import_trusted_file
from ejax.types import HostTimestep, PyTree
from interop.dense import in_words, is_dense, to_numpy

FINAL_OBS_KEYS = ("final_obs", "final_observation", "terminal_observation")
Rows = NDArray[np.bool_]


@runtime_checkable
class TorchVectorEnv(Protocol):
    """An environment of torch, the result of a factory.

    Spaces: ``single_observation_space`` and ``single_action_space`` of one row, or ``observation_space`` and
    ``action_space`` of one row or of all.
    """

    num_envs: int

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]: ...
    def step(self, action: torch.Tensor) -> tuple[Any, Any, Any, Any, Any]:
        """``(obs, reward, terminated, truncated, info)``, after the reset of rows that ended."""
        ...

    def close(self) -> None: ...


class TorchVector:
    """A vector environment of torch that resets rows which ended in the same step, or in the next one, where its
    ``metadata`` declares it in Gymnasium's way: that step is not a transition (``info["valid"]`` False).

    Tensors on the CPU are read as NumPy arrays without a copy. Arrays that are passed on are copied once, since an
    environment may write its next observation over this one.

    Args:
        env: is owned, and closed, by this object.
        device: where the environment's tensors are, and actions go.
        final_obs_key: where in ``info`` the terminal observations are, [N, ...] of which those of rows that ended are
            read; dots lead into mappings. None: any of ``FINAL_OBS_KEYS``.
        row_reset_option: what ``reset(options={…: indices})`` calls the rows to reset: ``env_ids`` in EmbodiChain
            (``reset_ids`` in its simulated tasks), ``env_idx`` in ManiSkill. None: it cannot reset some rows only.
        clip_actions: Box actions are clipped to the bounds of their space; EmbodiChain's trainers do not do that.

    Raises:
        ValueError: not such an environment, or one that does not reset rows itself.
    """

    seeds_rows = False

    def __init__(
        self,
        env: TorchVectorEnv,
        *,
        device: str = "cpu",
        final_obs_key: str | None = None,
        row_reset_option: str | None = "env_ids",
        clip_actions: bool = True,
    ) -> None:
        if not isinstance(env, TorchVectorEnv):
            text = f"a {type(env).__name__} is not a vector environment: it needs num_envs, reset, step, close"
            raise ValueError(text)
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
            text = f"{type(env).__name__} has autoreset_mode {mode}; it must reset rows that ended itself:"
            raise ValueError(f"{text} make it with autoreset_mode SAME_STEP or NEXT_STEP, or use the family gymnasium")
        self.env, self.mode, self.device = env, mode, torch.device(device)
        self.final_obs_key, self.row_reset_option, self.clip_actions = final_obs_key, row_reset_option, clip_actions
        self.num_envs = int(env.num_envs)
        self._raw_space = _row_space(env, "observation", self.num_envs)
        self.observation_space: gymnasium.Space[Any] = rows_space(self._raw_space)
        self.action_space = _row_space(env, "action", self.num_envs)
        self._form = action_form(self.action_space, clips=clip_actions)._replace(start=())  # given actions, not choices
        names = ("max_episode_steps", "max_episode_length")  # theirs, Isaac Lab's
        limits = (getattr(env, name, None) for name in names)
        self.max_episode_steps = int(next((limit for limit in limits if limit), 0))
        self.row_seed = np.zeros(self.num_envs, np.uint32)
        self._obs: PyTree = None
        self._resets_next = np.zeros(self.num_envs, bool)
        self._facts: dict[str, NDArray[np.float32]] | None = None
        """The entries of ``info`` in the first step: the same names at every step."""
        self._reported: set[str] = set()
        self._reports: deque[str] = deque()
        """Added to in the thread that steps, taken by another."""

    def reset(self, seed: NDArray[np.uint32], rows: Rows | None = None) -> PyTree:
        """Reset all rows by the first row's seed. Single rows continue the environment's own random numbers. Raises
        ValueError: the environment resets other rows too, or none."""
        chosen = np.ones(self.num_envs, bool) if rows is None else rows
        self.row_seed = np.where(chosen, seed, self.row_seed).astype(np.uint32)
        # they are reset now, and need no step for it
        self._resets_next &= ~chosen
        with torch.no_grad():
            if chosen.all() or self._obs is None:
                raw, _ = self.env.reset(seed=int(self.row_seed[0]))
                self._obs = self._read(raw)
            else:
                self._obs = self._reset_some(chosen)
        return self._obs

    def step(self, action: NDArray[Any]) -> HostTimestep:
        if self._obs is None:
            raise RuntimeError("step before reset: no episode has started")
        before = self._obs
        given = torch.from_numpy(to_action(self._form, action)).to(self.device)
        with torch.no_grad():
            answer = self.env.step(given)
        if len(answer) != 5:
            text = f"{type(self.env).__name__}.step gave {len(answer)} things, must give 5: obs, reward, terminated,"
            raise ValueError(f"{text} truncated, info (RSL-RL's wrappers give four: name the environment below them)")
        raw, raw_reward, raw_terminated, raw_truncated, info = answer
        info = {} if info is None else info
        reward = _numpy_of(raw_reward, "reward", (self.num_envs,))
        terminated, truncated = (
            _numpy_of(x, name, (self.num_envs,), boolean=True)
            for x, name in ((raw_terminated, "terminated"), (raw_truncated, "truncated"))
        )
        done = terminated | truncated
        self._obs = final_obs = self._read(raw)
        facts = self._info(info, done)
        if self.mode is AutoresetMode.NEXT_STEP:
            # the step after an episode's end only resets
            facts["valid"], self._resets_next = ~self._resets_next, done.copy()
        elif done.any():
            final_obs = self._final_obs(info, done, before)
        return HostTimestep(
            obs=self._obs,
            reward=np.array(reward, np.float32),
            terminated=terminated.copy(),
            truncated=truncated.copy(),
            info=facts,
            final_obs=final_obs,
        )

    def reports(self) -> list[str]:
        """Messages since the last call; each is given once."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def close(self) -> None:
        self.env.close()

    def _read(self, raw: Any, name: str = "obs") -> PyTree:
        """Observations as float32 vectors [N, F], copied."""
        return as_rows(self._raw_space, _numpy_tree(raw, self._raw_space, self.num_envs, self.device, name))

    def _reset_some(self, rows: Rows) -> PyTree:
        name = f"{type(self.env).__name__}.reset"
        remedy = (
            "set env.cfg.row_reset_option to the name under which its options take the indices of rows (EmbodiChain: "
            "env_ids, in simulated tasks reset_ids; ManiSkill: env_idx), or prevent what forces single rows to reset: "
            "values that are not finite"
        )
        if self.row_reset_option is None:
            text = f"rows {np.flatnonzero(rows).tolist()} must be reset, and row_reset_option is off; {remedy}"
            raise ValueError(text)
        indices = torch.from_numpy(np.flatnonzero(rows)).to(self.device)
        try:
            raw, _ = self.env.reset(options={self.row_reset_option: indices})
        except TypeError as error:
            text = f"{name} takes no options, so it cannot reset some rows only ({error}); {remedy}"
            raise ValueError(text) from error
        obs = self._read(raw)
        # an environment that ignores the option would silently end every episode
        if not _same_rows(~rows, obs, self._obs):
            text = f"{name}(options={{'{self.row_reset_option}': …}}) for rows {np.flatnonzero(rows).tolist()} changed"
            raise ValueError(f"{text} other rows too; {remedy}")
        if _same_rows(rows, obs, self._obs):
            raise ValueError(f"{name}(options={{'{self.row_reset_option}': …}}) changed nothing; {remedy}")
        return obs

    def _final_obs(self, info: Any, done: Rows, before: PyTree) -> PyTree:
        """``self._obs`` with the rows that ended as they were before the reset."""
        name = self.final_obs_key or next((key for key in FINAL_OBS_KEYS if info.get(key) is not None), "")
        found = info.get(name) if name else None
        if self.final_obs_key is not None:
            found = find(info, self.final_obs_key, ".", None)
            if found is None:
                given = f"info has {', '.join(map(str, info)) or 'nothing'}"
                raise ValueError(f"final_obs_key '{self.final_obs_key}' is not in info when an episode ends; {given}")
        if found is None:
            self._report(
                f"{type(self.env).__name__} gives no terminal observations (looked for {', '.join(FINAL_OBS_KEYS)} in "
                "info): where an episode is cut off, the value of the observation before its last step stands in"
            )
            return choose_rows(done, before, self._obs)
        return choose_rows(done, self._read(found, f"info.{name}"), self._obs)

    def _info(self, info: Mapping[str, Any], done: Rows) -> dict[str, Any]:
        """``success``, ``metrics`` and ``rewards``; of rows that ended, ``final_info`` takes precedence."""
        facts, passed_over = _facts_of(info, self.num_envs)
        final = info.get("final_info")
        if isinstance(final, Mapping):
            at_end, _ = _facts_of(final, self.num_envs)
            facts |= {name: choose_rows(done, x, facts.get(name, x)) for name, x in at_end.items()}
        if self._facts is None:
            # a rollout's arrays need the same names at every step: the first step's are all there will be
            self._facts = {name: np.full_like(x, np.nan) for name, x in facts.items()}
            self._facts.setdefault("success", np.full(self.num_envs, np.nan, np.float32))
        late = sorted(facts.keys() - self._facts.keys())
        if late or passed_over:
            names = ", ".join([*late, *passed_over])
            self._report(f"info of {type(self.env).__name__}: {names} not carried over: no [N, …] tensor at every step")
        known = {**self._facts, **{name: x for name, x in facts.items() if name in self._facts}}
        grouped: dict[str, Any] = {"success": known.pop("success")}
        for name, x in known.items():
            group, _, own = name.partition("/")
            grouped.setdefault(group, {})[own] = x
        return grouped

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._reports.append(text)


def make(
    place: str,
    *,
    num_envs: int,
    device: str = "cpu",
    final_obs_key: str | None = None,
    row_reset_option: str | None = "env_ids",
    clip_actions: bool = True,
    **cfg: Any,
) -> TorchVector:
    """``factory(num_envs=…, device=…, **cfg)`` of ``place``, see ``TorchVector``. Raises ValueError: no such place, or
    what the factory gives is not such an environment."""
    env = _factory(place)(num_envs=num_envs, device=device, **{name: thaw(value) for name, value in cfg.items()})
    return TorchVector(
        env, device=device, final_obs_key=final_obs_key, row_reset_option=row_reset_option, clip_actions=clip_actions
    )


def _factory(place: str) -> Callable[..., Any]:
    file, _, name = place.rpartition(":")
    if not is_import_path("env", place):
        raise ValueError(f"got 'torch:{place}'; must be torch:package.module:factory or torch:FILE.py:factory")
    try:
        if not file.endswith(".py"):
            return resolve("env", place)
        return getattr(import_trusted_file(place), name)
    except ImportError as error:
        raise ValueError(f"'{place}' cannot be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{file} has no '{name}'") from error


def _numpy_of(x: Any, name: str, shape: tuple[int, ...] | None, *, boolean: bool = False) -> NDArray[Any]:
    """Return a tensor of this shape as an array. Floats of 16 bits become float32. ``shape``: None:
    any. ``boolean``: its dtype must be bool. Raises ValueError: no tensor, or another shape or dtype."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, must be a tensor; for NumPy use the family gymnasium")
    if not is_dense(x):
        raise ValueError(f"{name} is {in_words(x)}; must be a dense tensor of floats, integers or bools")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}, must have {list(shape)}")
    if boolean and x.dtype != torch.bool:
        raise ValueError(f"{name} is {x.dtype}, must be torch.bool: (x > 0) makes it so")
    return to_numpy(x)


def _numpy_tree(obs: Any, space: gymnasium.Space[Any], num_envs: int, device: torch.device, name: str = "obs") -> Any:
    """Convert an observation of ``space`` (tensor, mapping or TensorDict, sequence) to arrays [N, ...].

    Parts that the space does not have are left out.

    Raises ValueError: a part is missing, of another shape, or on another device.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping):
            raise ValueError(f"{name} is a {type(obs).__name__}, its space is a Dict of {', '.join(space.spaces)}")
        missing = [key for key in space.spaces if key not in obs.keys()]  # noqa: SIM118  # TensorDict.__contains__ raises
        if missing:
            text = f"{name} lacks {', '.join(missing)} of its space; it has {', '.join(map(str, obs.keys()))}"
            raise ValueError(text)
        return {
            key: _numpy_tree(obs[key], part, num_envs, device, f"{name}.{key}") for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        if len(obs) != len(space):
            raise ValueError(f"{name} has {len(obs)} parts, its space is a Tuple of {len(space)}")
        parts = enumerate(space.spaces)
        return tuple(_numpy_tree(obs[i], part, num_envs, device, f"{name}.{i}") for i, part in parts)
    array = _numpy_of(obs, name, (num_envs, *(space.shape or ())))
    if obs.device.type != device.type or (obs.device.index or 0) != (device.index or 0):
        raise ValueError(f"{name} is on {obs.device}, the environment was to be on {device}; set env.cfg.device")
    return array


def _facts_of(info: Mapping[str, Any], num_envs: int) -> tuple[dict[str, NDArray[np.float32]], list[str]]:
    """``success``, ``metrics/<name>`` and ``rewards/<name>`` of ``info`` as [N, ...] float32, copied; and the
    names of those that cannot be."""
    named = {"success": info["success"]} if "success" in info else {}
    for group in ("metrics", "rewards", "terms"):
        part = info.get(group)
        named |= {f"{group}/{name}": x for name, x in part.items()} if isinstance(part, Mapping) else {}
    rows = {name: x for name, x in named.items() if isinstance(x, torch.Tensor) and x.shape[:1] == (num_envs,)}
    shapes = {"success": (num_envs,)}
    facts = {name: _numpy_of(x, f"info.{name}", shapes.get(name)).astype(np.float32) for name, x in rows.items()}
    return facts, [name for name in named if name not in rows]


def _row_space(env: Any, what: str, num_envs: int) -> gymnasium.Space[Any]:
    """``single_<what>_space``, or one row of ``<what>_space``. Raises ValueError: it has neither."""
    single = getattr(env, f"single_{what}_space", None)
    if isinstance(single, spaces.Space):
        return single
    batched = getattr(env, f"{what}_space", None)
    if not isinstance(batched, spaces.Space):
        text = f"{type(env).__name__} has no single_{what}_space that is a space of Gymnasium, got {single!r}"
        raise ValueError(text)
    return _first_row(batched, num_envs)


def _same_rows(rows: NDArray[np.bool_], a: PyTree, b: PyTree) -> bool:
    """Return True if the rows are equal, NaN to NaN too."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x[rows], y[rows], equal_nan=True) for x, y in pairs)


def _first_row(space: gymnasium.Space[Any], num_envs: int) -> gymnasium.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _first_row(part, num_envs) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Box) and len(space.shape) > 1 and space.shape[0] == num_envs:
        dtype: Any = space.dtype  # Gymnasium's releases differ in what they call its type
        return spaces.Box(space.low[0], space.high[0], dtype=dtype.type)
    return space
