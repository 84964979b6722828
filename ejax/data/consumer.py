"""One process's access to an engine: the buffer, a reader of it, whole episodes from it, and a line to the worker."""

import os
import time
from dataclasses import dataclass

import numpy as np

from ejax.data.buffer import TrajectoryBuffer, attach, fence
from ejax.data.control import Control
from ejax.data.demand import DemandWriter
from ejax.data.quota import QUOTA, Quota
from ejax.data.reader import ChunkReader
from ejax.data.supervisor import Ticket
from ejax.data.task import Episode, Origin, nest
from ejax.data.worker import DEMAND


@dataclass(frozen=True)
class Taken:
    """A copy of an episode that a worker made."""

    episode: Episode
    index: int
    """Its number, in the order of making."""
    origin: Origin

    @property
    def seed(self) -> int:
        return self.origin.seed


class Consumer:
    """Made once per process: a forked child must not use its parent's locks and generator.

    Raises:
        FileNotFoundError: the owner has removed the buffer.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.pid = os.getpid()
        self.buffer = attach(ticket.block, ticket.layout)
        self.control = Control(self.buffer)
        budget, quota = ticket.episode_sample_budget, None
        if budget is not None:
            quota = Quota(self.buffer.control["charged"], ticket.folder / QUOTA, budget)
        self.reader = ChunkReader(self.buffer, quota)
        self.demand = DemandWriter(ticket.folder / DEMAND)
        self.rng = np.random.default_rng()

    def stats(self) -> dict[str, float]:
        """The state of the run, as scalars.

        ``data/fill`` share of rows that hold an episode; ``data/episodes`` and ``data/failed_attempts`` so far;
        ``data/success_rate`` of the expert; ``data/episodes_per_s`` while it works; ``data/fills`` of the buffer;
        ``data/samples`` chunks drawn by all; ``data/samples_per_s`` since the engine was ready; ``data/age_s`` mean
        time since the rows were written; ``data/redrawn`` chunks that this process drew again; with an
        ``episode_sample_budget``, ``data/chunks_left`` that the present episodes may still be drawn for.
        """
        get = self.control.get
        full = self.buffer.version > 1
        now, ready_at, busy = time.time(), get("ready_at"), get("generating_s")
        episodes, failures, samples = get("episodes"), get("failures"), get("samples")
        written_at = self.buffer.episode["written_at"][full]
        left = {} if self.reader.quota is None else {"data/chunks_left": float(self.reader.chunks_left())}
        return left | {
            "data/fill": float(full.mean()),
            "data/episodes": float(episodes),
            "data/failed_attempts": float(failures),
            "data/success_rate": episodes / max(episodes + failures, 1),
            "data/episodes_per_s": episodes / busy if busy else 0.0,
            "data/fills": float(get("fills")),
            "data/samples": float(samples),
            "data/samples_per_s": samples / max(now - ready_at, 1e-9) if ready_at else 0.0,
            "data/age_s": float(now - written_at.mean()) if full.any() else 0.0,
            "data/redrawn": float(self.reader.redrawn),
        }


def take_episodes(buffer: TrajectoryBuffer, after: int) -> list[Taken]:
    """The episodes with an index above ``after``, in order. A row that is being written to is left out."""
    version, index = buffer.version.copy(), buffer.episode["index"].copy()
    fence()
    (rows,) = ((version > 0) & (version % 2 == 0) & (index > after)).nonzero()
    taken = []
    for row in rows[index[rows].argsort()]:
        length = int(buffer.episode["length"][row])
        origin = Origin(*(int(buffer.episode[name][row]) for name in Origin._fields))
        frames = {path: buffer.frames[path][row, :length].copy() for path in buffer.layout.spec.frames}
        fields = {path: buffer.episode[path][row].copy() for path in buffer.layout.spec.episode}
        segment_id = buffer.frames["segment_id"][row, :length].copy()
        terminated = bool(buffer.frames["terminated"][row, :length].any())
        fence()
        if buffer.version[row] == version[row]:
            episode = Episode(nest(frames), segment_id=segment_id, fields=nest(fields), terminated=terminated)
            taken.append(Taken(episode, int(index[row]), origin))
    return taken
