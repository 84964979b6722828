"""Precision of matrix products: its value, its scope and its end."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from case_tables import cases

from ejax.runtime.device import matmul_precision, prepare_jax


def lowered(platform: str) -> str:
    x = jnp.ones((4, 4))
    return jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=(platform,)).as_text()


@cases(
    "precision where shown",
    ("float32", "cuda", "precision = [HIGHEST, HIGHEST]"),
    ("tf32", "cuda:1", "lhs_precision_type = tf32"),
    ("bf16", "cuda", "lhs_precision_type = bf16"),
    ("float32", "cpu", "precision = [HIGHEST, HIGHEST]"),
    ("tf32", "cpu", "precision = [HIGHEST, HIGHEST]"),
    ("bf16", "cpu", "precision = [HIGHEST, HIGHEST]"),
)
def test_the_precision_is_that_of_every_product_in_the_program(precision: Any, where: str, shown: str) -> None:
    with matmul_precision(precision, where):
        assert shown in lowered(where.partition(":")[0])


def test_it_holds_in_all_threads_and_ends_with_the_run() -> None:
    before = lowered("cuda")
    seen: list[str] = []
    with matmul_precision("tf32", "cuda"):
        thread = threading.Thread(target=lambda: seen.append(lowered("cuda")))
        thread.start()
        thread.join()
    assert "tf32" in seen[0]
    assert lowered("cuda") == before


@pytest.mark.parametrize("home", ["no entry", "no folder", "a file", "XDG_CACHE_HOME", "relative XDG_CACHE_HOME"])
def test_without_a_home_that_can_be_written_nothing_is_cached_and_a_line_says_so(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a user id of a container that no entry of /etc/passwd has."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    found: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=found.__setitem__)
    monkeypatch.setattr("ejax.runtime.device.jax", SimpleNamespace(config=config))
    monkeypatch.setattr(Path, "home", unknown if "XDG" in home or home == "no entry" else lambda: tmp_path / "home")
    monkeypatch.setenv("XDG_CACHE_HOME", {"XDG_CACHE_HOME": f"{tmp_path}/cache"}.get(home, "cache"))
    if home == "a file":
        (tmp_path / "home").write_text("")
    prepare_jax("cpu")
    said = capsys.readouterr().err
    if home == "XDG_CACHE_HOME":
        assert Path(found["jax_compilation_cache_dir"]) == tmp_path / "cache" / "ejax" / "compiled" and not said
    else:
        assert "jax_compilation_cache_dir" not in found and len(said.splitlines()) == 1
        assert said.startswith("ejax: no compiled programs are kept") and "JAX_COMPILATION_CACHE_DIR" in said
    assert not (tmp_path / "ejax").exists() and (home == "XDG_CACHE_HOME") == (tmp_path / "cache").exists()
