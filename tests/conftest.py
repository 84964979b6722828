"""Tests run on the CPU, as if it were four devices, and strictly: what JAX or Python only warns about is an error.

``EJAX_TEST_PLATFORMS=cuda,cpu`` runs those that need no more than one device on a GPU, the engines' among them.
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
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
# what a test's command line trusts must not be remembered in the home of whoever runs the tests
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="ejax-tests-config-")

import jax
import pytest

atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
# under nohup, or in the background of a shell, these come ignored: tests that send them would wait for ever
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _handler)
jax.config.update("jax_numpy_rank_promotion", "raise")  # [N] + [N, A] is a bug more often than a wish


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs() -> Iterator[None]:
    """A file's programs are of no use to the next one: kept, they grow to several GB."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def strict_dtypes() -> Iterator[None]:
    """For the numeric core: a bool among floats, or an int, must be cast.

    Not for all: optax's Adam raises a Python float to the power of an int32 count, and so do trainings.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is traced from here on takes the form that is lowered for a GPU, and computes it on the CPU."""
    monkeypatch.setattr("jax.lax.platform_dependent", lambda *args, default, **others: default(*args))
    monkeypatch.setattr("ejax.training.programs._kept", OrderedDict())
    jax.clear_caches()  # of programs in the other form
    yield
    jax.clear_caches()


@pytest.fixture
def nothing_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code but ejax's own may run, whatever tests before this one named."""
    monkeypatch.setattr("ejax.schema.trust._named", {})
    monkeypatch.setattr("ejax.schema.trust._noticed", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config-home"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    # what a collected object complains of is shown, but must not fail whichever test runs just then
    config.addinivalue_line("filterwarnings", "default::pytest.PytestUnraisableExceptionWarning")
