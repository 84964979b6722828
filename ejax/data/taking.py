"""Whole episodes out of the buffer, to be kept."""

from dataclasses import dataclass

from ejax.data.buffer import TrajectoryBuffer, fence
from ejax.data.task import Episode, Origin, nest


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
