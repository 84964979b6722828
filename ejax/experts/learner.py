"""Episodes of a learner that acts, and of an expert that decides what it would have done in its place: DAgger's rounds
for ``ejax.data``. With the probability β of the round a step is the expert's.

Source: Ross et al. 2011, "A reduction of imitation learning and structured prediction to no-regret online learning".
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from ejax.data.task import Episode, EpisodeSpec
from ejax.experts.task import EnvRows, ScriptedTask, observation_fields
from ejax.schema.trust import import_trusted, trust

SEED, SUCCESS, UPDATE = "learner_seed", "success", "update"
"""Episode fields besides the task's own: what the episode follows from, whether the task was done, and the updates that
the learner had then."""


class Order(NamedTuple):
    """A round: who acts, and how. It lies pickled in the file that the task reads."""

    number: int
    update: int
    seed: int
    beta: float
    program: bytes
    """Serialized ``(parameters, fields of the observation, memory) -> (actions [N, K·A], memory)``, leaves as lists."""
    params: list[EnvRows]
    memory: list[EnvRows]
    """At an episode's start, leaves [N, ...]."""
    chunk: int
    """K, actions of one decision, which are carried out before the next."""


class Learner:
    """The learner of one attempt."""

    def __init__(self, order: Order, program: Any, seed: int, space: Any) -> None:
        self._order, self._program, self._space, self._rng = order, program, space, np.random.default_rng((seed, 1))
        self._memory, self._step = order.memory, 0

    def act(self, obs: Any, theirs: EnvRows) -> EnvRows:
        """Return actions [N, A]: its own, in some rows the expert's ``theirs``."""
        order = self._order
        if self._step % order.chunk == 0:
            plan, self._memory = self._program.call(order.params, observation_fields(obs), self._memory)
            self._plan = np.asarray(plan).reshape(len(theirs), order.chunk, -1)
        own = np.clip(self._plan[:, self._step % order.chunk], self._space.low, self._space.high)
        self._step += 1
        return np.where(self._rng.random(len(own))[:, None] < order.beta, theirs, own).astype(np.float32)


class LearnerTask:
    """A ``DemonstrationTask``: the environments and the expert of ``task``, a ``ScriptedTask``, and the learner of the
    file ``order``. Every episode is kept, however it ends; what a round makes follows from its order alone.

    TypeError: another kind of task.
    """

    def __init__(self, task: str, task_cfg: Mapping[str, Any], order: str) -> None:
        trust(task)  # who orders it has passed the gate
        module, _, name = task.partition(":")
        self.task: ScriptedTask = getattr(import_trusted(task), name)(**task_cfg)
        if not isinstance(self.task, ScriptedTask):
            raise TypeError(f"data.dagger needs an expert of ejax.experts, got {module}:{name}, which is none")
        self._order, self._round, self._attempt = Path(order), -1, 0

    def spec(self) -> EpisodeSpec:
        spec, own = self.task.spec(), {SEED: "int64", SUCCESS: "bool", UPDATE: "int64"}
        return EpisodeSpec(spec.frames, {**spec.episode, **{name: ((), kind) for name, kind in own.items()}})

    def generate(self, seed: int) -> list[Episode]:
        del seed  # of the worker, which a run that goes on starts again
        order: Order = pickle.loads(self._order.read_bytes())
        if order.number != self._round:
            self._round, self._attempt = order.number, 0
            self._program = jax.export.deserialize(bytearray(order.program))
        number = int(np.random.SeedSequence((order.seed, order.number, self._attempt)).generate_state(1)[0]) >> 1
        self._attempt += 1
        attempts = self.task.attempt(number, Learner(order, self._program, number, self.task.env.action_space))
        made = []
        for row, success in enumerate(attempts.success):
            fields = {SEED: number, SUCCESS: bool(success), UPDATE: order.update}
            made.append(self.task.episode(attempts, row, fields=fields))
        return made
