"""ONNX models by torch's own exporter, from the twin: of any batch, with the spec's names."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from interop.twin.kinds import Spec
from interop.twin.spec import NOISE, TOKENS

_OPSET, _IR_VERSION = 18, 8
"""The oldest that torch's exporter writes, and the format of its time; ONNX Runtime reads them since 1.14."""


def make_onnx(program: Any, spec: Spec) -> onnx.ModelProto:
    """Make the deployed policy of a ``torch.export.ExportedProgram``: inputs ``spec.inputs`` [batch, ...], outputs
    ``spec.outputs``, both by name.

    The input ``noise`` of a flow may be left out: zeros.
    """
    import torch

    names: Any = {"input_names": spec.inputs, "output_names": spec.outputs}
    with _silence("torch.onnx"):
        made: Any = torch.onnx.export(program, dynamo=True, opset_version=_OPSET, verbose=False, **names)
    model = made.model_proto
    model.ir_version = _IR_VERSION
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")  # the exporting machine's files and lines
    graph.ClearField("value_info")  # its shapes call the batch s0
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    if spec.head == "flow":
        _let_noise_be_left_out(graph, spec)
    onnx.checker.check_model(model, full_check=True)
    return model


def _let_noise_be_left_out(graph: onnx.GraphProto, spec: Spec) -> None:
    """Make zeros the default of the input ``noise``: one row of zeros, which is expanded to the batch."""
    every_row, rows, one, shape = f"{NOISE}_of_batch", "_rows", "_one", "_rows_by_one"
    for node in graph.node:
        node.input[:] = [every_row if name == NOISE else name for name in node.input]
    expansion = [
        helper.make_node("Shape", [TOKENS], [rows], start=0, end=1),
        helper.make_node("Concat", [rows, one], [shape], axis=0),
        helper.make_node("Expand", [NOISE, shape], [every_row]),
    ]
    graph.node.MergeFrom(expansion)
    for _ in expansion:  # in front: nodes are in the order in which they run
        graph.node.insert(0, graph.node.pop())
    graph.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), one))
    graph.initializer.append(numpy_helper.from_array(np.zeros((1, spec.sizes[0]), np.float32), NOISE))
    given = next(value for value in graph.input if value.name == NOISE)
    given.type.tensor_type.shape.dim[0].dim_param = f"{NOISE}_rows"


@contextlib.contextmanager
def _silence(library: str) -> Iterator[None]:
    """Drop what an exporter reports of its libraries, such as that torchvision is not installed."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
