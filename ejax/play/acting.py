"""A trained policy in one line, to act with: ``ejax.load(run).act(obs)``."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.config import RunConfig
from ejax.envs.actions import action_form, to_action
from ejax.envs.check import clips_actions
from ejax.episodes import act
from ejax.play.saved_policy import opened_policy, restore_policy
from ejax.policies.calls import check_obs, first_memory, forget_outside
from ejax.policies.normalize import acting_statistics, unlike_training
from ejax.training.environments import build_env, sample_obs
from ejax.types import Env, HostEnv, Key, Params, Policy, PyTree


class Actor:
    """A policy with its parameters, called with NumPy arrays. It keeps the memory of a policy with memory.

    Attributes: ``config``, ``env`` (of evaluations), ``policy`` and ``params``; ``example``, zeros in the form of one
    row; ``form`` of the actions, clipped where the environment clips them.
    """

    def __init__(
        self, config: RunConfig, env: Env | HostEnv, policy: Policy, params: Params, *, checkpoint: Path
    ) -> None:
        self.config, self.env, self.policy, self.params, self.checkpoint = config, env, policy, params, checkpoint
        self.example = jax.tree.map(np.asarray, sample_obs(env, 1))
        self._key = jax.random.key(config.trainer.seed)
        self._memory: tuple[int, PyTree] | None = None
        self._known = list(acting_statistics(params))
        # where the environment acts on what is beyond the bounds, clipping would make another policy
        self.form = action_form(env.action_space, clips=bool(clips_actions(env)))

    def __repr__(self) -> str:
        return f"Actor({self.config.env.id}, {self.config.policy.name}, checkpoint={str(self.checkpoint)!r})"

    def act(
        self, obs: PyTree, *, deterministic: bool = True, starts: NDArray[np.bool_] | None = None
    ) -> NDArray[np.generic]:
        """Choose actions of the environment's space: one for one observation, N for N along every leaf's first axis.

        A Box's are clipped to its bounds where the environment of the run clips them, integers always. They may be
        written into.

        Args:
            deterministic: the mode of the distribution; otherwise a sample.
            starts: [N] bool, rows whose episode starts with this observation, for a policy with memory. None: those
                after ``reset``, and the first.

        Raises:
            ValueError: an observation of another form than the environment's, with values that are not finite or do not
                fit its type, or an instruction that cannot be read.
        """
        rows, single = self.rows(obs)
        count = len(jax.tree.leaves(rows)[0])
        # another number of rows: other episodes
        if self._memory is None or self._memory[0] != count:
            self._memory = count, first_memory(self.policy, count)
        if self._known and (text := unlike_training(self.policy, self.params, rows, self._known)):
            self._known = []  # one warning, not one in each step
            warnings.warn(f"the policy has not learned from such an observation: {text}", stacklevel=2)
        memory = self._memory[1]
        if starts is not None:
            if (flags := np.asarray(starts)).dtype != bool or flags.shape not in ((), (count,)):
                raise ValueError(f"starts: got {flags.dtype}{list(flags.shape)}; must be bool [{count}]")
            memory = forget_outside(self.policy, memory, np.broadcast_to(flags, (count,)))
        # also for the mode, so that a later sample does not depend on which calls were deterministic
        self._key, key = jax.random.split(self._key)
        action, memory = self.answer(rows, memory, None if deterministic else key)
        self._memory = count, memory
        return action[0] if single else action

    def answer(self, rows: PyTree, memory: PyTree, key: Key | None = None) -> tuple[NDArray[np.generic], PyTree]:
        """Choose actions [N, A] for checked ``rows``: ``(actions, memory after them)``; nothing is kept.

        Args:
            key: to sample with. None: the mode of the distribution.
        """
        action, after = act(
            self.policy, self.params, rows, memory, self._key if key is None else key, samples=key is not None
        )
        return to_action(self.form, action), after

    def reset(self) -> None:
        """Start new episodes: a policy with memory forgets."""
        self._memory = None

    def rows(self, obs: PyTree) -> tuple[PyTree, bool]:
        """Check an observation, as ``act`` does: ``(rows [N, ...], whether it was a single one)``."""
        obs = jax.tree.map(np.asarray, obs, is_leaf=lambda x: isinstance(x, list))  # numbers, not a tree of them
        given: Any = jax.tree.structure(obs)
        wanted: Any = jax.tree.structure(self.example)
        if given != wanted:
            raise ValueError(f"got an observation of the form {given}; {self.config.env.id} gives {wanted}")
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(obs)]
        leaves, like = [np.asarray(x) for x in jax.tree.leaves(obs)], jax.tree.leaves(self.example)
        # one observation lacks the rows' axis
        single = leaves[0].ndim == like[0].ndim - 1
        leaves = [x[None] for x in leaves] if single else leaves
        shapes = [x.shape[1:] for x in leaves]
        if shapes != [x.shape[1:] for x in like] or len({x.shape[:1] for x in leaves}) != 1:
            text = ", ".join(str(list(x.shape[1:])) for x in like)
            raise ValueError(
                f"got observations {', '.join(str(list(np.shape(x))) for x in jax.tree.leaves(obs))}; one of "
                f"{self.config.env.id} is {text}, or N of them along a first axis"
            )
        rows = [_in_type(x, one.dtype, f"obs{path}") for x, one, path in zip(leaves, like, paths, strict=True)]
        checked = jax.tree.unflatten(wanted, rows)
        check_obs(self.policy, checked)
        return checked, single


def _in_type(x: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Cast ``x`` to an observation's type. ValueError: it cannot hold a value; real numbers may be rounded."""
    if x.dtype.kind not in "biuf" and not jax.dtypes.issubdtype(x.dtype, np.floating):  # ml_dtypes' floats have kind V
        raise ValueError(f"{name}: got an array of {x.dtype}; the environment's is of {dtype}")
    with np.errstate(all="ignore"):
        given = x.astype(dtype, copy=False)
        if dtype.kind == "f":
            # rounding a real number is expected; float32 changes an integer beyond 2^24, which is not
            kept = np.isfinite(given) & (given.astype(x.dtype) == x if x.dtype.kind in "iu" else True)
        else:
            kept = given == x
    if not kept.all():
        wrong = x[~kept].flat[0]
        raise ValueError(f"{name}: got {wrong} ({x.dtype}); allowed are finite numbers that {dtype} can hold")
    return given


def load(run: Path | str, *, checkpoint: str | None = None, member: int | None = None, device: str = "cpu") -> Actor:
    """Load the policy of a run.

    Args:
        run: the run's folder; without the time at its end: the newest run of that name.
        checkpoint: ``best``, ``latest`` or a path. None: the best one, or the latest where none is the best.
        member: of a population. None: the best one.
        device: that it acts on; the first call of a process decides for all.

    Raises:
        FileNotFoundError: ``run`` is not a run. CheckpointError: no such checkpoint, or a damaged one.
    """
    opened = opened_policy(Path(run), member=member, checkpoint=checkpoint, device=device, command="ejax.load")
    with opened as (directory, config, path):
        quarantine = directory.results / "quarantine" / "eval"
        env = build_env(config, phase="eval", num_envs=1, quarantine=quarantine, for_spaces=True)
        policy, params = restore_policy(config, env, path)
    return Actor(config, env, policy, params, checkpoint=path)
