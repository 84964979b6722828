"""Python called from programs that the compilation cache keeps."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from ejax.runtime import host_call as module
from ejax.runtime.host_call import host_call

PROGRAM = """
import sys, jax, jax.numpy as jnp
from ejax.runtime.host_call import host_call
factor = float(sys.argv[1])
shape = (jax.ShapeDtypeStruct((3,), jnp.float32),)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
compiled = jax.jit(lambda x: host_call(lambda x: (factor * x,), shape, x, name="scale")[0])
print(compiled(jnp.arange(3.0)).tolist(), len(hits))
"""


def both(x: Any, y: Any) -> tuple[NDArray[Any], ...]:
    return 2 * x, (x.sum(-1) + y).astype(np.int32), (y > 2)[..., None]


def shapes(x: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    single = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((1,), np.bool_)
    return jax.ShapeDtypeStruct(x.shape, x.dtype), *single


@pytest.mark.parametrize("rows", [(), (4,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("width", [0, 5])
def test_it_computes_what_a_pure_callback_does(rows: tuple[int, ...], width: int) -> None:
    x = jnp.arange(float(np.prod(rows) * width)).reshape(*rows, width)
    y = jnp.arange(np.prod(rows), dtype=jnp.int32).reshape(rows)

    def new(x: Any, y: Any) -> Any:
        return host_call(both, shapes(x), x, y, name="both")

    def known(x: Any, y: Any) -> Any:
        return jax.pure_callback(both, shapes(x), x, y, vmap_method="broadcast_all")

    for _ in rows:
        new, known = jax.vmap(new), jax.vmap(known)
    for mine, theirs in zip(jax.jit(new)(x, y), jax.jit(known)(x, y), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_the_next_process_finds_the_program_and_calls_its_own_function(tmp_path: Path) -> None:
    printed = []
    for factor in ("2.0", "3.0"):
        environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", PROGRAM, factor]
        printed.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert printed[0].startswith("[0.0, 2.0, 4.0]") and printed[1].startswith("[0.0, 3.0, 6.0]")
    assert int(printed[1].split()[-1]) > int(printed[0].split()[-1])


def test_an_exception_reaches_the_caller_with_its_line() -> None:
    def broken(x: Any) -> tuple[NDArray[Any], ...]:
        raise ZeroDivisionError("of no cube")

    shape = (jax.ShapeDtypeStruct((2,), np.float32),)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)test_host_call.py.*ZeroDivisionError: of no cube"):
        jax.block_until_ready(jax.jit(lambda x: host_call(broken, shape, x, name="broken"))(jnp.ones(2)))


def test_a_second_function_of_a_name_is_called_itself() -> None:
    shape = (jax.ShapeDtypeStruct((2,), np.float32),)
    first, second = (
        jax.jit(lambda x, n=n: host_call(lambda x: (n * x,), shape, x, name="twice"))(jnp.ones(2)) for n in (2, 3)
    )
    assert first[0].tolist() == [2, 2] and second[0].tolist() == [3, 3]


def test_threads_may_call_at_the_same_time() -> None:
    shape = (jax.ShapeDtypeStruct((100,), np.float32),)

    @jax.jit
    def run(x: Any) -> Any:
        return jax.lax.fori_loop(0, 50, lambda _, x: host_call(lambda x: (x + 1,), shape, x, name="add")[0], x)

    found: list[float] = []
    threads = [threading.Thread(target=lambda i=i: found.append(float(run(jnp.full(100, i))[7]) - i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [50.0] * 6


def test_another_version_of_the_interface_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_registered", lambda: False)
    shape = (jax.ShapeDtypeStruct((2,), np.float32),)
    run = jax.jit(lambda x: host_call(lambda x: (x + 5,), shape, x, name="plain"))
    assert "ejax_host_call" not in run.lower(jnp.ones(2)).as_text() and run(jnp.ones(2))[0].tolist() == [6, 6]
