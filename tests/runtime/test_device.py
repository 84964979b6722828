"""Precision of matrix products: its value, its scope and its end. Flags of CUDA graphs."""

import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejax.runtime import device
from ejax.runtime.device import matmul_precision


def lowered(platform: str) -> str:
    x = jnp.ones((4, 4))
    return jax.jit(lambda x: x @ x).trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("precision", "where", "shown"),
    [
        ("float32", "cuda", "precision = [HIGHEST, HIGHEST]"),
        ("tf32", "cuda:1", "lhs_precision_type = tf32"),
        ("bf16", "cuda", "lhs_precision_type = bf16"),
        ("float32", "cpu", "precision = [HIGHEST, HIGHEST]"),
        ("tf32", "cpu", "precision = [HIGHEST, HIGHEST]"),
        ("bf16", "cpu", "precision = [HIGHEST, HIGHEST]"),
    ],
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


def test_flags_of_cuda_graphs_are_added_unless_the_user_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setattr(device, "_accepted", lambda flag: True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    added = device.use_cuda_graphs.__wrapped__()
    assert added == ("--xla_gpu_graph_min_graph_size=1",)
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_command_buffer=FUSION --xla_gpu_graph_min_graph_size=1"


def test_flags_that_this_jaxlib_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "xla_gpu_enable_command_buffer"
    known = f"--{name}={device._GRAPHS[name]}"
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setattr(device, "_GRAPHS", {name: device._GRAPHS[name], "xla_gpu_of_another_release": "1"})
    monkeypatch.setenv("XLA_FLAGS", "")
    assert device.use_cuda_graphs.__wrapped__() == (known,)
    assert os.environ["XLA_FLAGS"] == known


def test_without_xla_for_cuda_there_are_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert device.use_cuda_graphs.__wrapped__() == () and os.environ["XLA_FLAGS"] == ""
