"""``trainer.profile``: a trace of some updates, and the time that each part of the program took in it."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from ejax.config.models import ProfileConfig
from ejax.schema.messages import noting
from ejax.schema.plain_files import to_json
from ejax.schema.writing import by_product, make_folder, replace_file
from ejax.training.steppers import Stepper


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
        from ejax.training.trace_shares import named_scopes, thread_operations, time_shares  # of few runs

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
