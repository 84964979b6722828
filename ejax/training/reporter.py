"""The log of a run: updates and evaluations with the caller's own numbers, time, memory, and updates not applied."""

import math
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax

from ejax.logs.metrics import MetricWriter
from ejax.runtime.stopwatch import ENGINE, Stopwatch
from ejax.schema.messages import number
from ejax.store.run_dir import RunDirectory
from ejax.training.callbacks import Callback, TrainingRun
from ejax.training.saver import Progress

OnLog: TypeAlias = Callable[[int, dict[str, float]], object]
OWN = "own/"  # before the caller's tags that ejax logs too
TIME = "time/"
_MIB = 2.0**20
_OF_MAXRSS = 1.0 if sys.platform == "darwin" else 1024.0  # bytes in the unit of ru_maxrss
_NAMES = {"loss": "loss", "grad_norm": "gradient"}
_CRITICS = {"value_loss": "critic's loss", "value_grad_norm": "critic's gradient"}
PAIRS = {  # verb -> tags of what samples did in training, and the mode in an evaluation
    "succeed in": ("charts/success_rate_avg_100", "eval/success_rate"),
    "return": ("charts/episode_reward_avg_100", "eval/avg_reward"),
}
_APART = 0.2  # difference that is worth a line: of rates of success, or of the range of returns so far
_FEW_UPDATES = 20
_LIMITED = (
    "the learning rate was at minimum_learning_rate or maximum_learning_rate after {count} of {total} updates: widen "
    "the limits, or change algorithm.cfg.desired_kl or n_epochs{more}"
)
_MORE = ", or use schedule=adaptive_per_update: 'adaptive' changes it in every minibatch, many from limit to limit"
_REMEDY = "lower algorithm.cfg.optimizer.learning_rate, look for rewards and observations that are not finite"


class MetricReporter(Callback):
    """Log updates and evaluations. ``clock`` holds the loop's seconds; ``device`` is the one whose memory is logged."""

    def __init__(
        self, writer: MetricWriter, progress: Progress, clock: Stopwatch, device: jax.Device, on_log: OnLog | None
    ) -> None:
        self._writer, self._progress, self._clock, self._device = writer, progress, clock, device
        self._on_log, self.total = on_log, Stopwatch()
        self._renamed: set[str] = set()
        self._apart, self._limited = 0, False
        self._rates: list[float] = []
        self.last: dict[str, float] = {}
        self.train_history: list[dict[str, float]] = []
        self.eval_history: list[dict[str, float]] = []

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        if not run.cadence.logs(run.update):  # between two lines only callbacks see the metrics
            return
        shown = {tag: x for tag, x in metrics.items() if not math.isnan(x)} | {"charts/SPS": run.steps_per_s}
        shown |= times(self.seconds()) | memory_in_use(self._device)
        self._log(run, shown)
        self.last = shown
        if "train/rate_at_limit" in shown and not self._limited:
            self._rates = [*self._rates, shown["train/rate_at_limit"]][-_FEW_UPDATES:]
            self._limited = sum(self._rates) > _FEW_UPDATES / 2
            if self._limited:
                options: Any = run.config.algorithm.cfg
                more, count = _MORE * (options.schedule == "adaptive"), int(sum(self._rates))
                self._writer.alarm(_LIMITED.format(count=count, total=len(self._rates), more=more))
        self.train_history.append({"global_step": run.step, **shown})

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self._log(run, dict(metrics))
        # what is compared, its value with samples and with the mode, and the range that it has
        does, tags = next((x for x in PAIRS.items() if x[1][1] in metrics), ("", ("", "")))
        sampled, mode = self.last.get(tags[0], math.nan), metrics.get(tags[1], math.nan)
        seen = [each[tags[1]] for each in self.eval_history if tags[1] in each] + [mode]
        span = max(seen) - min(seen) if does == "return" else 1.0
        self._apart = self._apart + 1 if abs(sampled - mode) > _APART * span > 0.0 else 0
        # once, until they agree again; returns of training lag, so that one evaluation says little
        if self._apart == (2 if does == "return" else 1):
            why = "exploration does a part of the work" if sampled > mode else "the noise of exploration costs the rest"
            self._writer.alarm(
                f"step {run.step:,}: sampled actions {does} {number(sampled)}, the policy's mode, as evaluations and "
                f"exports use it, {number(mode)}: {why}; train on, or lower policy.initial_log_std or "
                "algorithm.cfg.ent_coef"
            )
        self.eval_history.append({"global_step": run.step, **metrics})

    def seconds(self) -> dict[str, float]:
        """Take the seconds since the last call, by activity, and add them to ``total``."""
        seconds = self._clock.take() | ENGINE.take()
        for name, value in seconds.items():
            self.total.add(name, value)
        return seconds

    def _log(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        for tag in sorted(run.extra.keys() & metrics.keys()):
            run.extra[f"{OWN}{tag}"] = run.extra.pop(tag)  # an error would cost the training since the last save
            if tag not in self._renamed:
                self._writer.alarm(f"run.log: ejax logs '{tag}' too; the number of that name is logged as {OWN}{tag}")
            self._renamed.add(tag)
        metrics |= run.extra
        run.extra = {}  # numbers of the caller are in one line only
        with self._clock.of("log"):
            self._writer.write(run.step, metrics, self._progress.best)
        if self._on_log is not None and self._on_log(run.step, dict(metrics)) is False:
            run.stop()


def times(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"{TIME}{name}_s": value for name, value in seconds.items()}


def memory_in_use(first: jax.Device) -> dict[str, float]:
    """Return the peak MiB of this process, and those in use and at peak of its devices of ``first``'s kind."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _OF_MAXRSS
    found = {"memory/host_peak_mib": most / _MIB}
    for device in jax.local_devices(backend=first.platform):
        stats = device.memory_stats() or {}  # a CPU has none
        for name, key in (("in_use", "bytes_in_use"), ("peak", "peak_bytes_in_use")):
            if key in stats:
                found[f"memory/{device.platform}{device.local_hardware_id}_{name}_mib"] = stats[key] / _MIB
    return found


def breakdown(seconds: Mapping[str, float]) -> str:
    """List the longest activities first, in one line; those of less than a percent are left out."""
    # physics is inside other activities
    total = sum(value for name, value in seconds.items() if name != "physics") or 1.0
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.1f} s" for name, value in longest if value >= 0.01 * total)


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
