"""The latest numbers of a run as text: what the live views of a terminal and of a notebook have in common."""

import datetime
import math
import time
from collections.abc import Mapping

from ejax.logs.best import Best

SHORT_NAME = {
    "charts/SPS": "sps",
    "charts/episode_reward_avg_100": "avgReward(100)",
    "charts/episode_length_avg_100": "avgLength(100)",
    "charts/success_rate_avg_100": "success(100)",
}
"""EmbodiChain's."""
GROUPS = ("charts", "train", "rewards", "terms", "metrics", "eval")


class Latest:
    """The progress of a run, and its latest values. Other threads always see whole ones."""

    def __init__(self, title: str, *, total_steps: int, start_step: int = 0) -> None:
        self.title, self.total_steps, self.step = title, total_steps, start_step
        self.best: Best | None = None
        self._start_time = time.monotonic()
        self._first_write: tuple[int, float] | None = None
        self._last_write_time = self._start_time
        self._values: dict[str, float] = {}
        self._eval_step: int | None = None

    def take(self, step: int, metrics: Mapping[str, float], best: Best | None) -> None:
        self._last_write_time = time.monotonic()
        if self._first_write is None and step > self.step:
            self._first_write = (step, self._last_write_time)
        self._values = {**self._values, **metrics}  # a new mapping: a drawing thread has the old one whole
        self.step = step
        self.best = best
        if any(tag.startswith("eval/") for tag in metrics):
            self._eval_step = step

    @property
    def fraction(self) -> float:
        return min(self.step / max(self.total_steps, 1), 1.0)

    @property
    def progress(self) -> str:
        return f"{self.fraction:4.0%}  {self.step:,}/{self.total_steps:,}"

    @property
    def has_begun(self) -> bool:
        return self._first_write is not None

    def pace(self) -> str:
        elapsed = f"{duration(time.monotonic() - self._start_time)} elapsed"
        if not self.has_begun:
            return f"{elapsed}, waiting for the first update (compiling)"
        rate = self._values.get("charts/SPS", math.nan)
        return f"{elapsed}  {self.time_left()} left{'' if math.isnan(rate) else f'  {rate:,.0f} steps/s'}"

    def fields(self, group: str) -> dict[str, str]:
        tags = [tag for tag in self._values if tag.startswith(group + "/") and tag != "charts/SPS"]
        fields = {SHORT_NAME.get(tag, tag.removeprefix(group + "/")): number(self._values[tag]) for tag in tags}
        if group == "eval" and self._eval_step is not None:
            return {"at step": f"{self._eval_step:,}", **fields}
        return fields

    def best_text(self) -> str:
        return f"{number(self.best.value)}{at(self.best.step, ' at step {:,}')}" if self.best else ""

    def time_left(self) -> str:
        """Give the time for the remaining steps at the rate since the first update, to leave compilation out."""
        if self.step >= self.total_steps:
            return duration(0)
        # without compilation, which comes once
        first_step, first_time = self._first_write or (self.step, self._start_time)
        if self.step <= first_step:  # no rate is known yet
            return "-:--:--"
        seconds_per_step = (self._last_write_time - first_time) / (self.step - first_step)
        due = self._last_write_time + (self.total_steps - self.step) * seconds_per_step
        return duration(max(due - time.monotonic(), 0))


def at(step: int | None, form: str) -> str:
    return "" if step is None else form.format(step)


def number(value: float) -> str:
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))
