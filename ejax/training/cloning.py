"""What moves a run of behaviour cloning on: batches of demonstrations, and updates from them."""

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

import gymnasium
import jax
import numpy as np
import optax

from ejax.algorithms.step import RunState, init_host_run_state
from ejax.collectors import HostStep
from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.data import DataConfig
from ejax.policies.calls import check_obs
from ejax.training.demonstrations import Batch, Demonstrations
from ejax.training.environments import sample_obs
from ejax.training.parts import Parts
from ejax.training.programs import jitted
from ejax.training.steppers import Interrupted
from ejax.types import Env, HostEnv, Key, Metrics, Policy, TrainState

Clone: TypeAlias = Callable[[RunState, Batch, Key], tuple[RunState, Metrics]]


def cloning_parts(
    config: RunConfig,
    data: DataConfig,
    policy: Policy,
    env: Env | HostEnv,
    optimizer: optax.GradientTransformation,
    key: Key,
    *,
    dropout: bool,
) -> Parts:
    """The environment is there for its spaces, and to be evaluated in."""
    algorithm, options, space = config.algorithm.record, config.algorithm.cfg, env.action_space
    obs = sample_obs(env, 1)
    demonstrations = Demonstrations(data, config.trainer.buffer_size // data.chunk_size, obs)
    stepper = CloningStepper(
        demonstrations,
        policy,
        make_clone(policy, optimizer, options, update=algorithm.update, dropout=dropout),
        key,
        action_chunk=config.env.cfg.get("action_chunk", 1),
        num_outputs=space.shape[0] if isinstance(space, gymnasium.spaces.Box) else 0,
        env=env if isinstance(env, HostEnv) else None,
        what=(policy, optimizer, options, algorithm.update, dropout),
    )
    state = init_host_run_state(policy, optimizer, key, obs)
    return Parts(policy, env, optimizer, stepper, replace(state, source=demonstrations.state()))


def make_clone(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: Any,
    *,
    update: Callable[..., tuple[TrainState, Metrics]],
    dropout: bool = False,
) -> Clone:
    """One update of the run.

    Args:
        update: of the form of ``ejax.algorithms.bc.bc_update``.
    """

    def clone(state: RunState, batch: Batch, key: Key) -> tuple[RunState, Metrics]:
        train, losses = update(
            state.train, batch, key, policy=policy, optimizer=optimizer, config=config, dropout=dropout
        )
        metrics = {f"train/{name}": value for name, value in losses.items()}
        return replace(state, update=state.update + 1, train=train), metrics

    return clone


class CloningStepper:
    """An update from each batch; see ``Stepper``. ``RunState.source`` says which episodes there were.

    Args:
        action_chunk: K, actions of one decision of the policy.
        num_outputs: numbers of one decision; 0: of choices, which the policy itself checks.
        env: closed at the end, where it has something to close.
        what: all that the update depends on, for ``ejax.training.programs.jitted``.
    """

    max_updates, awaited, program = 1, "update", None

    def __init__(
        self,
        demonstrations: Demonstrations,
        policy: Policy,
        clone: Clone,
        key: Key,
        *,
        action_chunk: int = 1,
        num_outputs: int = 0,
        env: HostEnv | None = None,
        what: Hashable = None,
    ) -> None:
        self.demonstrations, self._policy = demonstrations, policy
        self._clone = jitted(what, clone)
        self._key, self._env = key, env
        self._action_chunk, self._num_outputs = action_chunk, num_outputs
        self._notes: list[str] = []

    def start(self, state: RunState) -> RunState:
        self._update = self._first = int(state.update)
        self._notes += self.demonstrations.start(self._update, state.source)
        return replace(state, source=self.demonstrations.state())

    def advance(self, state: RunState, count: int, interrupted: Interrupted) -> tuple[RunState, Metrics] | None:
        del count
        drawn = self.demonstrations.next(interrupted)
        if drawn is None:
            return None
        batch, waited_s = drawn
        if self._update == self._first:
            self._check_actions(batch)
        check_obs(self._policy, batch["obs"])
        began = time.perf_counter()
        state, metrics = self._clone(state, batch, jax.random.fold_in(self._key, self._update))
        facts = self.demonstrations.stats() | {"data/wait_s": waited_s}
        if self._update == self._first:  # compiles; what it computes is not waited for
            facts["time/compile_s"] = time.perf_counter() - began
        self._update += 1
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

    def watch_steps(self, listeners: Sequence[Callable[[HostStep], None]]) -> None:
        del listeners  # no environment steps

    def __enter__(self) -> "CloningStepper":
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
