"""``trainer.profile``: a trace of some updates, and the time that each part of the program took in it.

The program's text names the function of each operation in the trace: hence the shares of policy, environments, update.
"""

import bisect
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ejax.config.models import ProfileConfig
from ejax.schema.messages import noting
from ejax.schema.plain_files import to_json
from ejax.schema.writing import by_product, make_folder, replace_file
from ejax.training.steppers import Stepper

_PARTS = (
    ("jit(_act)", "policy"),
    ("jit(_step_all)", "environments"),
    ("jit(reset)", "environments"),
    ("jit(unroll)", "the rest of collecting"),
    ("_update)", "update"),
)
"""The first of these functions in an operation's path decides what it is part of."""
_OTHER = "other"


class Operation(NamedTuple):
    start_ns: float
    duration_ns: float
    name: str


class Profiler(AbstractContextManager["Profiler"]):
    """Traces the updates that the config names, once in a run."""

    def __init__(self, config: ProfileConfig | None, folder: Path) -> None:
        self._folder, self._tracing = folder, False
        self._edges = [] if config is None else [config.start, config.start + config.updates]

    def limit(self, update: int, count: int) -> int:
        """Limit ``count`` updates after ``update`` to those that lie on one side of the trace's beginning and end."""
        return min([count, *(edge - update for edge in self._edges if edge > update)])

    def before(self, update: int, state: Any) -> None:
        """Begin the trace, if it begins here, after ``state``, which must not be in it."""
        if update in self._edges[:1]:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # calls of Python functions would hide the program's operations
            with by_product("the profile"):
                make_folder(self._folder / "plugins" / "profile", self._folder.parent)
                jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
                self._tracing = True

    def ends(self, update: int) -> bool:
        """Return whether the trace under way ends at ``update``."""
        return self._tracing and update >= self._edges[1]

    def finish(self, state: Any, stepper: Stepper[Any]) -> list[str]:
        """End the trace, once ``state`` is there; messages about it."""
        jax.block_until_ready(state)
        self.close()
        number = self._edges[1] - self._edges[0]
        notes = [f"profile of {number} updates: {self._folder}; open perfetto_trace.json.gz in ui.perfetto.dev"]
        trace = max(self._folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime, default=None)
        if stepper.program is None or trace is None:  # several programs have no common text
            return notes
        shares = time_shares(thread_operations(trace), named_scopes(stepper.program))
        seconds = {part: ns / 1e9 for part, ns in shares.items()}
        facts = {"updates": number, "busy_s": seconds}
        with by_product("parts.json", notes.append):
            replace_file(self._folder / "parts.json", to_json(facts, indent=2), self._folder.parent)
        total = sum(seconds.values()) or 1.0
        text = ", ".join(f"{part} {share / total:.0%}" for part, share in sorted(seconds.items(), key=lambda x: -x[1]))
        return [*notes, f"profile: of the device's busy time {text}"]

    def close(self) -> None:
        """End a trace that is under way."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with noting(error, "writing the profile"):
            self.close()


def named_scopes(program: str) -> dict[str, str]:
    """Find the part of the training that each operation belongs to, from a compiled program's text."""
    found = re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.MULTILINE)
    return {name: next((part for function, part in _PARTS if function in path), _OTHER) for name, path in found}


def thread_operations(trace: Path) -> Iterator[list[Operation]]:
    """Yield the operations of each thread or stream of a trace."""
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            with warnings.catch_warnings():
                # Python 3.13 warns of the type of jaxlib's stats; as an error it would end the process
                warnings.simplefilter("ignore", DeprecationWarning)
                operations = [
                    Operation(event.start_ns, event.duration_ns, event.name)
                    for event in line.events
                    if any(name == "hlo_op" for name, _ in event.stats)
                ]
            if operations:
                yield operations


def time_shares(threads: Iterable[list[Operation]], parts: dict[str, str]) -> dict[str, float]:
    """Add up the nanoseconds of each part's operations themselves, without the operations inside them.

    An operation that is not in ``parts``, such as a copy by the compiler, belongs to the one around it.
    """
    taken: dict[str, float] = defaultdict(float)
    for operations in threads:
        around: list[tuple[float, str]] = []  # ends, and parts, of those that are not over
        for start, duration, name in sorted(operations, key=lambda each: (each.start_ns, -each.duration_ns)):
            # those that ended before this one starts
            del around[bisect.bisect_left([-end for end, _ in around], -start) :]
            part = parts.get(name) or (around[-1][1] if around else _OTHER)
            taken[part] += duration
            if around:
                taken[around[-1][1]] -= duration
            around.append((start + duration, part))
    return taken
