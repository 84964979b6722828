"""Tests run on the CPU, as if it were four devices, and strictly: what JAX or Python only warns about is an error.

``EJAX_TEST_PLATFORMS=cuda,cpu`` runs those that need no more than one device on a GPU, the engines' among them.
"""

import ctypes
import gc
import json
import math
import os
import signal
import sys
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = os.environ.get("EJAX_TEST_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    # most of the time goes into compilation, of which these take two fifths
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
if version("jaxlib").startswith("0.10."):  # a later one ends the process for a flag that it no longer has
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# and what one file or run has compiled is there for the next
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

DURATIONS = Path(__file__).with_name("durations.json")
"""CPU seconds of each test file, from a run of all of them with an empty cache of compiled programs."""
MAX_CPU_S = 4.0
"""Most CPU seconds of a test without the mark ``slow``, where the run is as fast as the recorded one."""
NOISE = 4.0
"""CPU seconds of one test, in one run to the next, vary by 1.7 where cores are shared, and by more where they are busy:
a run fails for what clearly exceeds both, and lists the slowest tests in any case."""
MAX_RESIDENT_BYTES = 2.0e9
"""Memory of a process above which it forgets compiled programs, after the file that it is in. It keeps 1.2 GB even
then, so that a lower limit would forget after each file, at 0.5 to 1.5 s of CPU, and have the next one retrace."""

# under nohup, or in the background of a shell, these come ignored: tests that send them would wait for ever
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _handler)
jax.config.update("jax_numpy_rank_promotion", "raise")  # [N] + [N, A] is a bug more often than a wish


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs() -> Iterator[None]:
    """Keep the programs of a file for the next one, which traces many of them too, until they fill the memory."""
    yield
    if _resident_bytes() > MAX_RESIDENT_BYTES:
        if programs := sys.modules.get("ejax.training.programs"):
            programs._kept.clear()
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":  # glibc keeps what is freed: 340 of 560 MB were left after test_ppo.py
            ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextmanager
def _registered_names_restored() -> Iterator[None]:
    from ejax.schema.registry import _TABLES

    before = {kind: dict(table) for kind, table in _TABLES.items()}
    yield
    for kind, table in _TABLES.items():
        table.clear()
        table.update(before[kind])


@pytest.fixture(autouse=True, scope="module")
def _forget_registered_names() -> Iterator[None]:
    """Keep the names that a file registers to itself: others list them, in whichever order they run."""
    with _registered_names_restored():
        yield


@pytest.fixture
def registered_names() -> Iterator[None]:
    """Keep the names that a test registers to itself."""
    with _registered_names_restored():
        yield


def _resident_bytes() -> float:
    """Return the memory of this process; infinite where no /proc shows it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return math.inf
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def strict_dtypes() -> Iterator[None]:
    """For the numeric core: a bool among floats, or an int, must be cast.

    Not for all: optax's Adam raises a Python float to the power of an int32 count, and so do trainings.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace the form that is lowered for a GPU from here on, and compute it on the CPU."""
    monkeypatch.setattr("jax.lax.platform_dependent", lambda *args, default, **others: default(*args))
    monkeypatch.setattr("ejax.runtime.device.ON_CPU", "float32")  # as "highest", by which runs trace the other form
    monkeypatch.setattr("ejax.training.programs._kept", OrderedDict())
    # JAX keeps traces by this setting: those of the other form stay, for the tests to come
    jax.config.update("jax_numpy_rank_promotion", "warn")  # which is an error again, by filterwarnings
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code but ejax's own may run, even if tests before this one named some."""
    monkeypatch.setattr("ejax.schema.trust._named", set())
    monkeypatch.setattr("ejax.schema.trust._passed", set())
    monkeypatch.setattr("ejax.schema.trust._noticed", set())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CPUBudget(), "cpu_budget")
    config.addinivalue_line("filterwarnings", "error")
    # JAX writes programs into its cache in place: who reads one that another worker is writing compiles it instead
    config.addinivalue_line("filterwarnings", "default:Error reading persistent compilation cache:UserWarning")
    # what a collected object complains of is shown, but must not fail whichever test runs just then
    config.addinivalue_line("filterwarnings", "default::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by their time, the longest first: one that starts last would keep the other processes waiting."""
    for item in items:
        words = [word for mark in item.iter_markers("slow_cases") for word in mark.args]
        if any(word in item.name for word in words):
            item.add_marker("slow")
    recorded = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -recorded.get(item.path.name, math.inf))


class CPUBudget:
    """Measure the CPU seconds of each test, its subprocesses' among them, and fail the run for one that takes too long.

    A module's fixtures count as those of the first test that uses them, apart from its own seconds.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self.seconds: dict[str, dict[str, float]] = {}
        self.over: dict[str, float] = {}

    @staticmethod
    def _now() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    def pytest_runtest_logstart(self) -> None:
        self._before = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = self._now()
        report.user_properties.append(("cpu_s", now - self._before))
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what workers measured, in the process that starts them."""
        for name, value in report.user_properties:
            if name == "cpu_s":
                self.seconds.setdefault(report.nodeid, {})[report.when] = value

    def files(self) -> dict[str, float]:
        """CPU seconds of each file."""
        sums: Counter[str] = Counter()
        for node, parts in self.seconds.items():
            sums[Path(node.partition("::")[0]).name] += sum(parts.values())
        return {name: round(seconds, 1) for name, seconds in sorted(sums.items())}

    def slowness(self) -> float:
        """Ratio of this run's CPU seconds to the recorded ones, at least 1: a busy machine takes more for the same."""
        recorded, files = json.loads(DURATIONS.read_text()), self.files()
        both = files.keys() & recorded.keys()
        return max(1.0, sum(files[name] for name in both) / max(1.0, sum(recorded[name] for name in both)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # one of several workers
        if session.config.getoption("--record-durations"):
            DURATIONS.write_text(json.dumps(self.files(), indent=0) + "\n")
        if session.config.getoption("markexpr") == "not slow" and json.loads(DURATIONS.read_text()):
            limit = MAX_CPU_S * NOISE * self.slowness()
            self.over = {node: parts["call"] for node, parts in self.seconds.items() if parts.get("call", 0.0) > limit}
        if self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.seconds:
            return
        slowest = sorted(self.seconds.items(), key=lambda entry: -sum(entry[1].values()))[:10]
        terminalreporter.section("CPU seconds of the ten slowest tests (fixtures + test)")
        for node, parts in slowest:
            terminalreporter.line(
                f"{sum(parts.values()) - parts.get('call', 0.0):5.1f} + {parts.get('call', 0.0):4.1f}  {node}"
            )
        for node, seconds in self.over.items():
            terminalreporter.line(
                f"over the budget: {seconds:.1f} s, allowed {MAX_CPU_S * NOISE * self.slowness():.1f}: {node}. "
                "Make it shorter, or mark it slow."
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write the files' CPU seconds to durations.json")
