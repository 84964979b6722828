"""Updates that were not applied because something in them was not finite: their number, and messages about them."""

import math
from collections.abc import Mapping
from pathlib import Path

from ejax.store.run_dir import RunDirectory
from ejax.training.callbacks import Callback, TrainingRun
from ejax.training.saver import Progress

_NAMES = {"loss": "loss", "grad_norm": "gradient"}
_CRITICS = {"value_loss": "critic's loss", "value_grad_norm": "critic's gradient"}
_REMEDY = "lower algorithm.cfg.optimizer.learning_rate, look for rewards and observations that are not finite"


class NonFiniteUpdateError(FloatingPointError):
    """An update that is not finite, where ``skip_nonfinite_updates`` is off."""


def skipped_fraction(metrics: Mapping[str, float]) -> float:
    """Return the part of an update that was not applied: 0 to 1."""
    return max(metrics.get("train/skipped_update", 0.0), metrics.get("train/skipped_fraction", 0.0))


def skip_notes(update: int, metrics: Mapping[str, float]) -> list[str]:
    """Write lines for the console; none where all of the update was applied."""
    excessive = metrics.get("train/skipped_excessive_gradient", 0.0) > 0.0
    why = "the gradient was above max_grad_norm_before_clip" if excessive else "loss, gradient or step were not finite"
    counts = {what: metrics.get(f"train/{what}", 0.0) for what in ("skipped_minibatches", "skipped_update")}
    return [f"update {update}: {what} {count:.0f}, {why}" for what, count in counts.items() if count > 0.0]


def refuse_nonfinite(update: int, metrics: Mapping[str, float], last_checkpoint: Path | None) -> None:
    """Raise NonFiniteUpdateError, in one line, if something in the update was not finite."""
    # a gradient above its limit is finite
    unusable = skipped_fraction(metrics) - metrics.get("train/skipped_excessive_gradient", 0.0)
    if unusable <= 0.0 and math.isfinite(metrics.get("train/loss", 0.0)):
        return
    broken = [tag.removeprefix("train/") for tag, x in metrics.items() if tag[:6] == "train/" and not math.isfinite(x)]
    names = _NAMES if set(broken) & set(_NAMES) else _CRITICS  # the critic is named where it alone broke
    what = " and ".join(names[name] for name in names if name in broken) or "step of the optimizer"
    terms = ", ".join(name for name in broken if name not in names)
    raise NonFiniteUpdateError(
        f"update {update} gave a non-finite {what}{f' ({terms})' if terms else ''}; last checkpoint: "
        f"{last_checkpoint or 'none'}. To continue, {_REMEDY}, and train again"
        f"{f' with policy.init_from={last_checkpoint}' if last_checkpoint else ''}; "
        "or set algorithm.cfg.skip_nonfinite_updates=true, which skips such updates"
    )


def mostly_skipped_text(skipped: float, updates: int) -> str:
    """Explain a run that learned nothing in more than half of its updates, and the remedy."""
    return (
        f"{skipped:.0f} of {updates} updates were skipped, because loss, gradient or step were not finite (or the "
        f"gradient above max_grad_norm_before_clip): this run has hardly learned; {_REMEDY}, and train again"
    )


class SkippedUpdates(Callback):
    """Count updates that were not applied. ``skips`` False: the first update that is not finite ends the run."""

    def __init__(self, progress: Progress, directory: RunDirectory, *, skips: bool) -> None:
        self._progress, self._directory, self._skips = progress, directory, skips

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        if not self._skips:
            refuse_nonfinite(run.update, metrics, next(iter(self._directory.periodic()), None))
        self._progress.skipped_updates += skipped_fraction(metrics)
        for text in skip_notes(run.update, metrics):
            run.note(text)
