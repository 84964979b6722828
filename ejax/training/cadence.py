"""When a run evaluates, saves and logs: functions of the update alone, so that a resumed run does as it would have."""

from dataclasses import dataclass

_SECONDS_PER_DISPATCH = 0.5
"""Short enough for a live console and for a signal to be answered, long enough for dispatch to cost nothing."""


def crosses(update: int, rows: int, every: int) -> bool:
    """Whether ``update`` reaches or passes a multiple of ``every`` env steps. An ``every`` of 0 means never.

    Args:
        rows: env steps of one update.
    """
    return every > 0 and update * rows // every > (update - 1) * rows // every


def divides(update: int, every: int) -> bool:
    """Whether ``update`` is a multiple of ``every``. An ``every`` of 0 means never."""
    return every > 0 and update % every == 0


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The events of a run. Frequencies are in env steps, but for those whose name says updates."""

    rows: int
    """Env steps of one update."""
    num_updates: int
    eval_freq: int
    """0: only at the end, if at all."""
    save_freq: int
    save_frequency_updates: int
    log_freq_updates: int

    def evaluates(self, update: int) -> bool:
        return crosses(update, self.rows, self.eval_freq)

    def saves(self, update: int) -> bool:
        return crosses(update, self.rows, self.save_freq) or divides(update, self.save_frequency_updates)

    def logs(self, update: int) -> bool:
        return divides(update, self.log_freq_updates) or update == self.num_updates

    def updates_until_event(self, update: int, limit: int) -> int:
        """Updates from ``update`` to the next one that is evaluated or saved, that one included; at most ``limit``."""
        limit = min(limit, self.num_updates - update)
        events = (n for n in range(1, limit) if self.evaluates(update + n) or self.saves(update + n))
        return next(events, limit)

    def video_number(self, update: int) -> int:
        """Multiples of ``eval_freq`` passed; an evaluation at the end, between two of them, has the next number."""
        number = update * self.rows // max(1, self.eval_freq)
        return number if self.eval_freq == 0 or self.evaluates(update) else number + 1


class Throttle:
    """Updates per dispatch: as many as fit into half a second, or a fixed number.

    Args:
        max_updates: the most that one dispatch can do.
        adapts: False: always that many.
    """

    def __init__(self, max_updates: int, *, adapts: bool) -> None:
        self._max_updates = max_updates
        self.limit = 1 if adapts else max_updates
        self._adapts = adapts

    def took(self, count: int, seconds: float) -> None:
        """A dispatch of ``count`` updates took ``seconds``."""
        if self._adapts:
            # grow slowly, so that one slow dispatch (an evaluation) does not shrink the next ones to nothing
            fitting = int(count * _SECONDS_PER_DISPATCH / max(seconds, 1e-3))
            self.limit = max(1, min(fitting, 2 * self.limit, self._max_updates))
