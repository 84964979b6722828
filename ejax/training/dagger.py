"""Rounds of DAgger: the engine's worker lets the learner act and the expert label, and the episodes are kept.

Round r is made before update r·``every``, from the parameters of that moment and ``(data.seed, r)`` alone. So a resumed
run makes again what a kill took; episodes that it finds are compared, and left as they are.
"""

import itertools
import pickle
import tempfile
import zlib
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ejax.config import ConfigError, Problem
from ejax.config.data import DaggerConfig, DataConfig
from ejax.data import OnlineDataEngine, OnlineDataEngineCfg
from ejax.data.reader import Taken
from ejax.data.task import Origin, flatten, nest_fields
from ejax.experts.learner import SEED, SUCCESS, LearnerTask, Order
from ejax.policies.calls import apply_policy, first_memory
from ejax.schema.registry import place_of_task
from ejax.schema.writing import make_folder, replace_file
from ejax.store.checkpoint import CheckpointError
from ejax.training.fields import open_kept, read_observation
from ejax.types import Params, Policy, PyTree

FOLDER = "demonstrations"
_NEVER_S = 1e9
"""s after which a round is given up: its worker's own limits come first."""
_PLACE = "ejax.experts.learner:LearnerTask"


class Rounds(AbstractContextManager["Rounds"]):
    """The rounds of one run, kept in ``demonstrations`` of its folder. A context manager: leaving it ends the worker.

    Args:
        obs: zeros in the form of one environment's observation, leaves [1, ...].
        chunk: actions of the policy's one decision.
    """

    def __init__(self, data: DataConfig, policy: Policy, obs: PyTree, chunk: int, run: Path) -> None:
        self._data, self._policy, self._obs, self._chunk, self._run = data, policy, obs, chunk, run
        self._options = cast(DaggerConfig, data.dagger)
        self.folder = run / FOLDER
        # not in the run's folder, which may be anybody's: it is unpickled
        self._private = tempfile.TemporaryDirectory(prefix="ejax-rounds-")
        self._order = Path(self._private.name, "round.pickle")
        self._engine: OnlineDataEngine | None = None
        self._program: bytes | None = None
        self._facts: dict[str, float] = {}

    def due(self, update: int) -> int | None:
        """Return the number of the round before this update, if there is one."""
        number, rest = divmod(update, self._options.every)
        return None if rest or number >= (self._options.rounds or number + 1) else number

    def collect(self, update: int, params: Params, count: int) -> int:
        """Make the round before ``update``, after ``count`` episodes. Return how many there are then. CheckpointError:
        the folder goes on with other episodes than these. Exception: the expert's own."""
        number = update // self._options.every
        leaves, memory = (
            [np.asarray(x) for x in jax.tree.leaves(tree)]
            for tree in (params, first_memory(self._policy, self._task.task.num_envs))
        )
        if self._program is None:
            self._program = self._export(params)
        order = Order(number, update, self._data.seed, self._beta(number), self._program, leaves, memory, self._chunk)
        replace_file(self._order, pickle.dumps(order))
        if self._engine is None:
            self._engine, generation = OnlineDataEngine(self._cfg), 1
            self._engine.start()
            self._stream = self._engine.episodes()
        else:
            generation = self._engine.request_refill()
            self._engine.wait_for_generation(generation, _NEVER_S)
        make_folder(self.folder, self._run)
        taken = list(itertools.islice(self._stream, self._cfg.buffer_size))
        if any(each.origin.generation != generation for each in taken):
            raise RuntimeError(f"round {number}: the worker's episodes are of several generations")
        self._keep(taken, count, number)
        return count + len(taken)

    def state(self, count: int) -> dict[str, Any]:
        """Identify the first ``count`` episodes, for a checkpoint. CheckpointError: they are not all there."""
        if not count:
            return {"num_episodes": jnp.int32(0), "digest": jnp.uint32(0)}
        reader, size = self._reader(), self._cfg.buffer_size
        if len(reader) < count:
            text = f"{self.folder} has {len(reader)} of the {count} episodes that the checkpoint's run had"
            raise CheckpointError(f"{text}; put them back, or start a new run")
        fields = [reader.fields(i) for i in range(count)]
        facts = np.array([(each["length"], each["seed"]) for each in fields], np.int64)
        self._facts = {
            "data/round": count // size - 1.0,
            "data/beta": self._beta(count // size - 1),
            "data/episodes": float(min(count, self._options.max_episodes or count)),
            "data/queries": float(facts[:, 0].sum()),
            "data/learner_success": float(np.mean([each[SUCCESS] for each in fields[-size:]])),
        }
        return {"num_episodes": jnp.int32(count), "digest": jnp.uint32(zlib.crc32(facts.tobytes()))}

    def open(self, count: int, part: slice) -> Any:
        """Open the episodes that are drawn from, of the first ``count``."""
        first = max(0, count - (self._options.max_episodes or count))
        options = {"episodes": range(first, count), "cache_mb": self._data.cache_mb, "part": part}
        return open_kept("windows", str(self.folder), "data", **options)

    def stats(self) -> dict[str, float]:
        """Return ``data/…`` of the newest round: queries are the labels of all rounds together."""
        return dict(self._facts)

    def __exit__(self, *error: Any) -> None:
        if self._engine is not None:
            self._engine.__exit__(*error)
        self._private.cleanup()

    def _reader(self) -> Any:
        return open_kept("episodes", str(self.folder), "data")

    def _beta(self, number: int) -> float:
        return float(self._options.beta * self._options.beta_decay**number)

    @cached_property
    def _task(self) -> LearnerTask:
        """The worker's task, for its forms: it makes nothing here."""
        return LearnerTask(**self._cfg.task_cfg)

    @cached_property
    def _cfg(self) -> OnlineDataEngineCfg:
        assert self._data.engine is not None, "data_problems asks for it"
        task, arguments = self._data.engine.demonstrator
        place = place_of_task(task) if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"
        arguments = {"task": place, "task_cfg": arguments, "order": str(self._order.absolute())}
        given = {"task": _PLACE, "task_cfg": arguments, "gym_config": {}, "action_config": {}}
        return self._data.engine.replace(**given, refill_policy="manual", seed=0)

    def _export(self, params: Params) -> bytes:
        """Serialize the learner's decisions for the worker, which has neither its code nor its device."""
        size, form = self._task.task.num_envs, jax.tree.structure(params)
        memory = first_memory(self._policy, size)

        def decide(leaves: list[Any], fields: dict[str, Any], memories: list[Any]) -> tuple[Any, list[Any]]:
            frames = nest_fields({path: x[:, None] for path, x in fields.items()})
            obs = jax.tree.map(lambda x: x[:, 0], read_observation(frames, self._obs, self._data, "data"))
            before = jax.tree.unflatten(jax.tree.structure(memory), memories)
            distribution, _, after = apply_policy(self._policy, jax.tree.unflatten(form, leaves), obs, before)
            return distribution.env_action(distribution.mode()), jax.tree.leaves(after)

        drawn = ("actions", "expert_actions", "rewards", "obs/image", "obs/wrist")
        frames = {path: each for path, each in self._task.spec().frames.items() if path not in drawn}
        fields = {path: jax.ShapeDtypeStruct((size, *shape), dtype) for path, (shape, dtype) in frames.items()}
        try:
            exported = jax.export.export(jax.jit(decide), platforms=["cpu"])(
                jax.tree.leaves(params), fields, jax.tree.leaves(memory)
            )
        except ConfigError as error:
            text = "; ".join(problem.text for problem in error.problems)
            text = f"the learner acts by what the expert's environment observes at each step: {text}"
            raise ConfigError([Problem("data.dagger", text)]) from error
        return bytes(exported.serialize())

    def _keep(self, taken: list[Taken], count: int, number: int) -> None:
        """Append a round's episodes, or compare them with those that are there."""
        from ejax.data.lerobot.write import EpisodeWriter  # the extra data

        fps = max(1, round(1.0 / self._task.task.control_period))
        with EpisodeWriter(self.folder, self._task.spec(), fps=fps, append=True) as writer:
            there = self._reader() if writer.num_episodes > count else None
            for index, each in enumerate(taken, count):
                fields = flatten(each.episode.fields)
                if there is not None and index < writer.num_episodes:
                    kept = flatten(there[index].frames)
                    if all(np.array_equal(x, kept[path]) for path, x in flatten(each.episode.frames).items()):
                        continue
                    text = f"episode {index} of {self.folder} is not the one that this run makes from its parameters"
                    raise CheckpointError(
                        f"{text}; another run has written there: start a new run, or put its folder back"
                    )
                origin = Origin(int(fields[SEED]), number, number + 1)
                writer.append(each.episode, np.asarray(fields["instruction"]).item().decode(), origin=origin)
