"""What moves a run of behaviour cloning on: batches of demonstrations, and updates from them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import TypeAlias

import jax
import numpy as np
import optax

from ejax.algorithms.bc import BCConfig, bc_update
from ejax.config import ConfigError, Problem
from ejax.demonstrations import Batch, Demonstrations
from ejax.steppers import Interrupted
from ejax.steps import RunState
from ejax.types import HostEnv, Key, Metrics, Policy

Clone: TypeAlias = Callable[[RunState, Batch, Key], tuple[RunState, Metrics]]


def make_clone(
    policy: Policy, optimizer: optax.GradientTransformation, config: BCConfig, *, dropout: bool = False
) -> Clone:
    """One update of the run."""

    def clone(state: RunState, batch: Batch, key: Key) -> tuple[RunState, Metrics]:
        train, losses = bc_update(
            state.train, batch, key, policy=policy, optimizer=optimizer, config=config, dropout=dropout
        )
        metrics = {f"train/{name}": value for name, value in losses.items()}
        return replace(state, update=state.update + 1, train=train), metrics

    return clone


class BCStepper:
    """An update from each batch; see ``ejax.steppers.Stepper``. ``RunState.envs`` tells which episodes there were.

    Args:
        action_chunk: K, actions of one decision of the policy.
        num_outputs: numbers of one decision; 0: of choices, which the policy itself checks.
        env: closed at the end, where it has something to close.
    """

    most = 1

    def __init__(
        self,
        demonstrations: Demonstrations,
        clone: Clone,
        key: Key,
        *,
        action_chunk: int = 1,
        num_outputs: int = 0,
        env: HostEnv | None = None,
    ) -> None:
        self.demonstrations = demonstrations
        self._clone = jax.jit(clone)
        self._key, self._env = key, env
        self._action_chunk, self._num_outputs = action_chunk, num_outputs
        self._notes: list[str] = []

    def start(self, state: RunState) -> RunState:
        self._update = self._first = int(state.update)
        self._notes += self.demonstrations.start(self._update, state.envs)
        return replace(state, envs=self.demonstrations.state())

    def advance(self, state: RunState, count: int, interrupted: Interrupted) -> tuple[RunState, Metrics] | None:
        del count
        drawn = self.demonstrations.next(interrupted)
        if drawn is None:
            return None
        batch, waited_s = drawn
        if self._update == self._first:
            self._check_actions(batch)
        state, metrics = self._clone(state, batch, jax.random.fold_in(self._key, self._update))
        self._update += 1
        facts = self.demonstrations.stats() | {"data/wait_s": waited_s}
        rows = {name: np.array([value]) for name, value in facts.items()}
        return state, {name: x[None] for name, x in metrics.items()} | rows

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reports(self) -> list[str]:
        notes = self._notes + self.demonstrations.notes
        self._notes, self.demonstrations.notes = [], []
        return notes

    def versions(self) -> list[int] | None:
        return None

    def __enter__(self) -> "BCStepper":
        self.demonstrations.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.demonstrations.__exit__(kind, error, traceback)
        finally:
            if self._env is not None:
                self._env.close()

    def _check_actions(self, batch: Batch) -> None:
        action = batch["action"]
        given = action.shape[2:]
        if self._num_outputs and given != (self._num_outputs // self._action_chunk,):
            text = (
                f"the demonstrated actions are {list(given)}, but the policy decides on {self._num_outputs} numbers, "
                f"which are {self._action_chunk} actions (env.cfg.action_chunk)"
            )
            raise ConfigError([Problem("data.action_field", text)])
