"""Behaviour cloning: batches of demonstrations, drawn ahead of their use, and updates from them.

Batch k is drawn by a generator made from ``(data.seed, k)``: nothing random is stored. Several devices have equal parts
of its windows; of kept episodes each process draws all of them and reads those of its devices, of a live engine, which
other in each process, it draws those alone.
"""

import threading
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ejax.algorithms.step import RunState, init_host_run_state
from ejax.config.data import DataConfig
from ejax.data import DataBudgetExhaustedError, OnlineDataEngine, OnlineDataWorkerError
from ejax.data.dataset import Chunks, ChunkSource
from ejax.data.prefetch import Ahead
from ejax.data.samplers import make_rng
from ejax.data.task import LOSS_MASK
from ejax.policies.calls import check_obs
from ejax.runtime.processes import Group
from ejax.runtime.sharding import join_rows, own_rows, process_count
from ejax.schema.messages import noting
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import place_of_task
from ejax.store.checkpoint import CheckpointError
from ejax.training.environments import sample_obs
from ejax.training.fields import open_kept, policy_numbers, read_array, read_observation, real_numbers
from ejax.training.host_steppers import MeshUpdate
from ejax.training.parts import Ingredients, Parts
from ejax.training.programs import jitted
from ejax.training.steppers import Layout, ShouldStop, Stepper, of_one_update
from ejax.types import Array, HostEnv, Key, Metrics, Params, PyTree

if TYPE_CHECKING:
    from ejax.training.dagger import Rounds

Batch = dict[str, PyTree]
_GRACE_S = 1.0
"""s that a batch which cannot be drawn waits for the run to be stopped, before it is an error."""
_NEVER_S = 1e9
"""s after which new episodes are given up: their worker's own limits come first."""


@runtime_checkable
class FittedPolicy(Protocol):
    """A policy that normalizes by statistics of the demonstrations that it is first cloned from."""

    def fit_units(self, params: Params, obs: PyTree, action: Array) -> Params:
        """Return ``params`` with statistics of these frames, leaves [..., F]."""


def cloning_parts(made: Ingredients, data: DataConfig, layout: Layout | None = None, run: Path = Path()) -> Parts:
    """Make the parts of a run that clones; the environment is there for its spaces, and to be evaluated in.

    ``layout``: of several devices, which have ``algorithm.cfg.batch_size`` windows of each gradient step each. ``run``:
    its folder. ConfigError: rounds of DAgger on several devices.
    """
    config, update, options = made.config, made.config.algorithm.record.update, made.config.algorithm.cfg
    obs = sample_obs(made.env, 1)
    mesh = None if layout is None else layout.mesh
    num_devices = 1 if mesh is None else mesh.size
    num_windows = num_devices * config.trainer.buffer_size // data.chunk_size
    check = partial(check_obs, made.policy)  # outside the program, where values can be seen
    numbers = partial(policy_numbers, made.env.action_space, config.env.action_chunk)
    rounds = None
    if data.dagger is not None:
        if mesh is not None:
            raise ConfigError([Problem("trainer.distributed", "got true, but data.dagger trains on one device")])
        from ejax.training.dagger import Rounds  # with experts

        rounds = Rounds(data, made.policy, obs, config.env.action_chunk, run)
    demonstrations = Demonstrations(data, num_windows, obs, mesh=mesh, check=check, numbers=numbers, rounds=rounds)
    same = {"policy": made.policy, "optimizer": made.optimizer, "config": options, "dropout": made.dropout}

    def clone(state: RunState, batch: Batch, key: Key) -> tuple[RunState, Metrics]:
        train, losses = update(state.train, batch, jax.random.fold_in(key, state.update), **same)
        metrics = {f"train/{name}": value for name, value in losses.items()}
        return replace(state, update=state.update + 1, train=train), metrics

    mesh_update = None if layout is None else MeshUpdate(clone, made.key, layout)
    alone = partial(jitted((update, *same.values()), clone), key=made.key)
    stepper = CloningStepper(made, demonstrations, alone, mesh_update)
    state = init_host_run_state(made.policy, made.optimizer, made.key, obs)
    state = replace(state, source=demonstrations.state())
    return Parts(made.policy, made.env, made.optimizer, stepper, state, num_devices)


class CloningStepper(Stepper[RunState]):
    """An update from each batch; ``RunState.source`` identifies the episodes.

    Args:
        clone: an update of the run from a batch, on one device; on several it is ``mesh_update``'s.
    """

    def __init__(
        self,
        made: Ingredients,
        demonstrations: "Demonstrations",
        clone: Callable[[RunState, Batch], tuple[RunState, Metrics]],
        mesh_update: MeshUpdate | None,
    ) -> None:
        self.demonstrations, self._env, self._mesh_update = demonstrations, made.env, mesh_update
        self._clone = clone if mesh_update is None else mesh_update.learn
        # the processes draw a part of each batch
        self._group = Group(made.config.trainer.process_timeout_s) if process_count() > 1 else None
        # a policy that another run has trained keeps its units, a new one's are those of the first batch
        fits = made.config.policy.init_from is None and isinstance(made.policy, FittedPolicy)
        self._fits = cast(FittedPolicy, made.policy) if fits else None

    def start(self, state: RunState) -> RunState:
        self._update = self._first = int(state.update)
        self.demonstrations.start(self._update, state.source)
        state = replace(state, source=self.demonstrations.state())
        return state if self._mesh_update is None else self._mesh_update.place(state)

    def advance(self, state: RunState, count: int, should_stop: ShouldStop) -> tuple[RunState, Metrics] | None:
        del count
        if self.demonstrations.renew(self._update, state.train.params):
            state = replace(state, source=self.demonstrations.state())
        drawn, began = self.demonstrations.next(should_stop), time.perf_counter()
        is_first = self._update == self._first
        if drawn is not None and is_first and self._mesh_update is not None:
            self._mesh_update.compile(state, drawn[0])  # not while the others wait
        has_batch = drawn is not None
        if self._group is not None:  # all processes must make the update, or none
            has_batch = all(self._group.gather(has_batch, "have its part of the batch"))
        if drawn is None or not has_batch:
            return None
        batch, waited_s = drawn  # seconds in which the device had nothing to do
        if self._fits is not None and self._update == 0:
            params = self._fits.fit_units(state.train.params, batch["obs"], batch["action"])
            state = replace(state, train=replace(state.train, params=params))
            state = state if self._mesh_update is None else self._mesh_update.place(state)
        state, metrics = self._clone(state, batch)
        facts = self.demonstrations.stats() | {"data/wait_s": waited_s}
        if is_first:  # compiles; what it computes is not waited for
            facts["time/compile_s"] = time.perf_counter() - began
        self._update += 1
        return state, of_one_update(metrics, facts)

    def reports(self) -> list[str]:
        notes, self.demonstrations.notes = self.demonstrations.notes, []
        return notes

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.demonstrations.__exit__(kind, error, traceback)
        finally:
            with noting(error, "closing the environment"):
                if isinstance(self._env, HostEnv):
                    self._env.close()


class Demonstrations(AbstractContextManager["Demonstrations"]):
    """The ``data`` section at work. A context manager: leaving it ends threads and worker.

    Args:
        num_windows: in one batch, each of ``config.chunk_size`` frames, and those before by ``config.history_length``.
        obs: zeros in the form of one environment's observation, leaves [1, ...].
        mesh: the devices that have equal parts of the windows. None: one has all.
        check: refuses observations of a batch that the policy would misread.
        numbers: makes a policy's numbers of actions.
        rounds: in which the learner acts. None: the episodes do not depend on it.

    Raises:
        ConfigError: kept episodes that cannot be read.
    """

    def __init__(
        self,
        config: DataConfig,
        num_windows: int,
        obs: PyTree,
        *,
        mesh: Mesh | None = None,
        check: Callable[[PyTree], None] = lambda obs: None,
        numbers: Callable[[Any, Any], Any] = real_numbers,
        rounds: "Rounds | None" = None,
    ) -> None:
        self._rounds = rounds
        self._num_windows, self._obs, self._mesh, self._check, self._numbers = num_windows, obs, mesh, check, numbers
        self.part = slice(0, num_windows) if mesh is None else own_rows(list(mesh.devices.flat), num_windows)
        self.config, self._seed = config, config.seed
        self.engine: OnlineDataEngine | None = None
        self._source: ChunkSource
        self._state: PyTree = ()
        if rounds is not None:
            self._state = rounds.state(0)
        elif config.engine is None:
            self._source, self._state = _open_folder(config, None, self.part)
        else:
            task, self._seed = config.engine.task, _of_process(config.seed)
            task = place_of_task(task) if isinstance(task, str) else task
            options = config.engine.replace(task=task, seed=_of_process(config.engine.seed or config.seed))
            self._source = self.engine = OnlineDataEngine(options)
        self._ahead: Ahead[Batch] | None = None
        budget = None if config.engine is None else config.engine.episode_sample_budget
        # with a budget one at a time: new episodes are then enough for whoever waited for them
        self._drawing: Any = nullcontext() if budget is None else threading.Lock()
        self.notes: list[str] = []

    def state(self) -> PyTree:
        """Identify the episodes drawn from, for a checkpoint; () for a live engine, whose episodes cannot be kept."""
        return self._state

    def start(self, first: int, state: PyTree) -> None:
        """Begin to draw batch ``first`` and those after it.

        Args:
            state: of ``state``, or of a checkpoint: episodes that were added since are left alone.

        Raises:
            CheckpointError: the folder does not begin with the episodes that it had.
            Exception: raised by the task, or the reason why no episode was made.
        """
        if self._rounds is not None:
            self._open_rounds(int(state["num_episodes"]))
            if int(self._state["digest"]) != int(state["digest"]):
                text = f"does not begin with the {int(state['num_episodes'])} episodes that it had"
                raise CheckpointError(f"{self._rounds.folder} {text}; put it back, or start a new run")
            if self._rounds.due(first) is not None:
                return  # ``renew`` goes on
        elif self.engine is not None:
            self.engine.start()
            if first > 0:
                text = "not exact: the demonstrations are made again, so batches differ from an uninterrupted run's"
                self.notes.append(text)
        else:
            count, folder = int(state["num_episodes"]), self.config.folder
            if count < int(self._state["num_episodes"]):
                self.notes.append(f"continues with the first {count} episodes of {folder}; later ones are left alone")
            self._source, self._state = _open_folder(self.config, count, self.part)
            if int(self._state["digest"]) != int(state["digest"]):
                text = f"{folder} does not begin with the {count} episodes that the run was started with"
                raise CheckpointError(f"{text}; set data.folder to the original one")
        # batch k is drawn for update k, also after a resume
        self._ahead = Ahead(self._draw, self.config.prefetch, first=first, num_workers=self.config.num_workers)

    def renew(self, update: int, params: PyTree) -> bool:
        """Make the round of episodes that is due before ``update``, if any, and draw from then on from it too."""
        if self._rounds is None or self._rounds.due(update) is None:
            return False
        if self._ahead is not None:
            self._ahead.__exit__()
        self._open_rounds(self._rounds.collect(update, params, int(self._state["num_episodes"])))
        self._ahead = Ahead(self._draw, self.config.prefetch, first=update, num_workers=self.config.num_workers)
        return True

    def _open_rounds(self, count: int) -> None:
        assert self._rounds is not None, "who opens them has asked"
        self._state = self._rounds.state(count)
        if count:
            self._source = self._rounds.open(count, self.part)

    def next(self, should_stop: Callable[[], bool]) -> tuple[Batch, float] | None:
        """Wait for the next batch, on its way to the device; return it with the seconds of waiting. None: stopped.

        The batch: ``obs`` and ``action``, leaves [R, C, ...]; around a frame also ``valid`` and ``loss_mask``.

        Raises:
            ConfigError: the fields do not fit the environment's spaces.
            Exception: raised by the task; OnlineDataWorkerError where the worker died or hangs.
        """
        if self._ahead is None:
            raise RuntimeError("start() comes before drawing")
        started = time.monotonic()
        try:
            batch = self._ahead.next(should_stop)
        except OnlineDataWorkerError:
            # what stops a run may have ended the worker first, by a signal to all processes
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                if should_stop():
                    return None
                time.sleep(_GRACE_S / 100)
            raise
        return None if batch is None else (batch, time.monotonic() - started)

    def stats(self) -> dict[str, float]:
        """Return ``data/…`` of ``OnlineDataEngine.stats``; of kept episodes their number."""
        if self._rounds is not None:
            return self._rounds.stats()
        if self.engine is not None:
            return self.engine.stats()
        return {"data/episodes": float(self._state["num_episodes"])}

    def __exit__(self, *error: Any) -> None:
        try:  # the engine first: a draw that waits for new episodes ends with it
            if self.engine is not None:
                self.engine.__exit__(*error)
            if self._rounds is not None:
                self._rounds.__exit__(*error)
        except OnlineDataWorkerError as late:  # all batches were drawn: it is worth a note
            self.notes.append(f"the demonstrations ended before the run did: {late}")
        finally:
            if self._ahead is not None:
                self._ahead.__exit__()

    def _draw(self, number: int) -> Batch:
        config = self.config
        with self._drawing:
            chunks = self._sample(make_rng(self._seed, number))  # nothing random is kept: a resume draws the same
        obs = read_observation(chunks, self._obs, config, "data")
        action = read_array(chunks, config.action_field, "data.action_field")
        masks = {name: chunks[name] for name in ("valid", LOSS_MASK) if config.history_length is not None}
        self._check(obs)
        batch = {"obs": obs, "action": self._numbers(action, chunks["valid"]), **masks}
        return jax.device_put(batch) if self._mesh is None else join_rows(batch, self._mesh, self._num_windows)

    def _sample(self, rng: np.random.Generator) -> Chunks:
        config, mode, source = self.config, self.config.sampling_mode, self._source
        count = self._num_windows if self.engine is None else self.part.stop - self.part.start
        sample = partial(source.sample_batch, count, config.chunk_size, mode, rng=rng)
        if config.history_length is not None:
            around: Any = mode  # data_problems refuses the third mode
            windows = (count, config.history_length, config.chunk_size, around)
            sample = partial(source.sample_batch_with_context, *windows, rng=rng)
        for _ in range(2):  # a request may join a refill under way, some of whose episodes were drawn from already
            try:
                return sample()
            except DataBudgetExhaustedError:
                if self.engine is None:
                    raise
                self.engine.wait_for_generation(self.engine.request_refill(), _NEVER_S)
        return sample()


def _of_process(seed: int) -> int:
    """Return the seed of this process's engine: the episodes of each are others."""
    if process_count() == 1:
        return seed
    return int(np.random.SeedSequence((seed, jax.process_index())).generate_state(1)[0])


def _open_folder(config: DataConfig, count: int | None, part: slice) -> tuple[ChunkSource, PyTree]:
    """Open the first ``count`` episodes, or all, to read a ``part`` of each draw, with what identifies them."""
    chosen = None if count is None else range(count)
    options = {"episodes": chosen, "cache_mb": config.cache_mb, "part": part}
    episodes = open_kept("windows", str(config.folder), "data", **options)
    # bytes that distinguish kept episodes from others, without reading their frames
    facts = [episodes.reader.fields(i) for i in range(len(episodes))]
    numbers = [np.array([each["length"], each["seed"]], np.int64).tobytes() for each in facts]
    times = [np.float64(each["written_at"]).tobytes() for each in facts]
    digest = zlib.crc32(b"".join(a + b for a, b in zip(numbers, times, strict=True)))
    return episodes, {"num_episodes": jnp.int32(len(facts)), "digest": jnp.uint32(digest)}
