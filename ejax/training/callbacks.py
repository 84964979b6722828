"""Callbacks: the caller's code that runs at the events of a training, before ejax logs and saves.

Order in one update: ``on_step`` for each step of environments outside the program, ``on_rollout``, ``on_update``, then
``on_save`` and ``on_evaluation`` where they are due. Of a dispatch of several updates, events follow when it is over;
no callback makes the device wait.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ejax.algorithms.step import RunState
from ejax.config import RunConfig
from ejax.schema.messages import duration, explain, number
from ejax.training.cadence import Cadence
from ejax.types import Env, HostEnv, Params, Policy

if TYPE_CHECKING:
    from ejax.collectors import HostStep


@dataclass(kw_only=True)
class RunResult:
    """Result of a run; EmbodiChain's names."""

    policy: Policy = field(repr=False)
    params: Params = field(repr=False)
    run_dir: Path
    global_step: int
    num_updates: int
    elapsed_time_sec: float
    """Duration of this call, compilation included."""
    training_fps: float
    """Environment steps per second of this call, after compilation; evaluation and logging included."""
    finished: bool
    """False after SIGTERM or Ctrl-C: the run can be resumed."""
    skipped_updates: float = 0.0
    """In the whole run: updates that were not applied, and the parts of others that were not."""
    best_eval_value: float | None = None
    latest_checkpoint_path: Path | None = None
    best_checkpoint_path: Path | None = None
    last_train_metrics: dict[str, float] = field(default_factory=dict, repr=False)
    last_eval_metrics: dict[str, float] = field(default_factory=dict, repr=False)
    train_history: list[dict[str, float]] = field(default_factory=list, repr=False)
    eval_history: list[dict[str, float]] = field(default_factory=list, repr=False)
    fresh_eval_metrics: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    """``best`` and ``last``: means over ``trainer.final_eval_episodes``, checkpoint, number and seeds of episodes.
    Empty for a run that is not finished or not evaluated."""
    seconds: dict[str, float] = field(default_factory=dict, repr=False)
    """Seconds by activity, as in the log's ``time/``: those of the loop, and of the C engine within them."""

    def _repr_html_(self) -> str:
        """Show curves and facts in a notebook."""
        from ejax.logs.console import result_html  # draws curves

        facts = {
            "run": str(self.run_dir),
            "steps": f"{self.global_step:,}, in {self.num_updates:,} updates",
            "wall time": f"{duration(self.elapsed_time_sec)}, {self.training_fps:,.0f} steps/s",
            "finished": "yes" if self.finished else 'no; continue with train(config, resume="latest")',
            **({} if self.best_eval_value is None else {"best evaluation": number(self.best_eval_value)}),
            "best checkpoint": str(self.best_checkpoint_path or "none"),
            "latest checkpoint": str(self.latest_checkpoint_path or "none"),
        }
        return result_html(facts, [*self.train_history, *self.eval_history])


@dataclass
class TrainingRun:
    """A run under way, as its callbacks see it."""

    config: RunConfig
    run_dir: Path
    policy: Policy
    env: Env | HostEnv
    cadence: Cadence
    state: RunState
    """After the last update of the dispatch that ``update`` is part of; on the device, where reading it waits. The next
    update overwrites a replay buffer in it."""
    update: int
    """The update of this event, counted from 1 over the whole run; 0 before the first."""
    note: Callable[[str], object]
    """Show a line of text on the console."""
    steps_per_s: float = 0.0
    """Environment steps per second of this call, compilation left out."""
    evaluation_due: bool = False
    stopped: bool = False
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Environment steps of the whole run (of cloning: samples)."""
        return self.update * self.cadence.rows

    def stop(self) -> None:
        """End the run as Ctrl-C does: the updates under way are finished, and the state is saved."""
        self.stopped = True

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add numbers to the next line of the log, such as ``{"own/height_m": 0.3}``.

        One under a tag that ejax logs itself, such as ``train/loss``, is logged as ``own/train/loss``.
        """
        self.extra |= metrics


class Callback(Protocol):
    """Base class with methods that do nothing: override those that are needed. An exception ends the training.

    Of several processes the first alone has callbacks.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Run once, when all is compiled and before the first update."""
        return

    def on_step(self, step: "HostStep") -> None:
        """Run after each step of environments outside the program; of those inside, never.

        With several groups of environments, or ``collector.mode: async``, another thread calls it, one at a time.
        """
        return

    def on_rollout(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Run for each rollout, with its metrics before an update: rewards, lengths, waiting times."""
        return

    def on_update(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Run after each update, with all its metrics."""
        return

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Run after each evaluation, with means over its episodes."""
        return

    def on_save(self, run: TrainingRun, path: Path) -> None:
        """Run after each checkpoint, the best one's included."""
        return

    def on_end(self, run: TrainingRun, result: RunResult) -> None:
        """Run once, when the run is saved and evaluated for the last time; not after an exception."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps of this callback: numbers, texts, lists and mappings of JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave. It comes before ``on_start`` where a run continues."""
        return


class Callbacks:
    """The caller's callbacks, by the names of their classes; a second one of a class is ``Name#2``."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._named: dict[str, Callback] = {}
        counts = Counter[str]()
        for each in callbacks:
            name = type(each).__qualname__
            counts[name] += 1
            self._named[name if counts[name] == 1 else f"{name}#{counts[name]}"] = each

    def __iter__(self) -> Any:
        return iter(self._named.values())

    def meta(self) -> dict[str, Any]:
        """Return the states of all that have one, for the meta of a checkpoint; ValueError if JSON cannot hold one."""
        states: dict[str, Any] = {name: each.state_dict() for name, each in self._named.items()}
        for name, state in states.items():
            try:
                text = json.dumps(state)  # now, with the callback's name, not in the middle of a save
                states[name] = text if "NaN" in text else state  # as a text: a file of JSON has no NaN
            except (TypeError, ValueError) as error:
                text = f"callback {name}: its state_dict cannot be saved: {explain(error)}"
                raise ValueError(f"{text}; return numbers, texts, lists and mappings, x.tolist() for arrays") from None
        kept = {name: state for name, state in states.items() if state}
        return {"callbacks": kept} if kept else {}

    def load(self, states: Mapping[str, Any]) -> list[str]:
        """Hand each callback its state; return messages about states that nobody takes."""
        for name, each in self._named.items():
            if name in states:  # a callback that is new to the run begins from its start
                each.load_state_dict(json.loads(states[name]) if isinstance(states[name], str) else states[name])
        left = sorted(states.keys() - self._named.keys())
        return [f"the checkpoint has the state of callback {name}, which this call does not have" for name in left]

    def step_listeners(self) -> list[Callable[["HostStep"], None]]:
        """List the ``on_step`` of those that have one: collectors make nothing for nobody."""
        return [each.on_step for each in self if getattr(type(each), "on_step", None) is not Callback.on_step]
