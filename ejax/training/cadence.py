"""Times to evaluate, save and log."""

from dataclasses import dataclass

from ejax.config.models import TrainerConfig


def crosses(update: int, rows: int, every: int) -> bool:
    """Return whether an ``update`` of ``rows`` env steps reaches or passes a multiple of ``every`` steps; 0: never."""
    return every > 0 and update * rows // every > (update - 1) * rows // every


def divides(update: int, every: int) -> bool:
    """Return whether ``update`` is a multiple of ``every``; 0: never."""
    return every > 0 and update % every == 0


@dataclass(frozen=True)
class Cadence:
    """Times to evaluate, save and log, in env steps or updates as the config has them: of the update alone."""

    trainer: TrainerConfig
    rows: int
    """Env steps of one update."""

    @property
    def eval_freq(self) -> int:
        """Env steps between evaluations; 0: only at the end, if at all."""
        return self.trainer.eval_freq if self.trainer.enable_eval else 0

    def evaluates(self, update: int) -> bool:
        return crosses(update, self.rows, self.eval_freq)

    def saves(self, update: int) -> bool:
        every = self.trainer.save_frequency_updates
        return crosses(update, self.rows, self.trainer.save_freq) or divides(update, every)

    def logs(self, update: int) -> bool:
        return divides(update, self.trainer.log_freq_updates) or update == self.trainer.num_updates

    def updates_until_event(self, update: int, limit: int) -> int:
        """Count updates from ``update`` to the next one that is evaluated or saved, inclusive, up to ``limit``."""
        limit = min(limit, self.trainer.num_updates - update)
        # a dispatch ends at an event: the states within it are never seen
        events = (n for n in range(1, limit) if self.evaluates(update + n) or self.saves(update + n))
        return next(events, limit)

    def video_number(self, update: int) -> int:
        """Count multiples of ``eval_freq`` passed; an evaluation at the end, between two of them, has the next one."""
        number = update * self.rows // max(1, self.eval_freq)
        return number if self.eval_freq == 0 or self.evaluates(update) else number + 1
