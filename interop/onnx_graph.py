"""An ONNX graph straight from a policy spec and a state_dict, node by node: dynamic batch, no torch, no exporter.

Opset 17, which ONNX Runtime reads since 1.12: operators that came later (Gelu) are written out.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from interop.policy_spec import NetworkSpec, PolicySpec

OPSET = 17
_IR_VERSION = 8
_SIMPLE_ACTIVATIONS = {"relu": "Relu", "elu": "Elu", "tanh": "Tanh", "none": "Identity"}


def make_onnx(spec: PolicySpec, state_dict: Mapping[str, NDArray[np.float32]]) -> onnx.ModelProto:
    """The deployed policy: inputs ``spec.actor.inputs`` [batch, F], outputs ``spec.outputs``, both by name."""
    graph = _Graph()
    leaves = list(spec.actor.inputs)
    x = leaves[0] if len(leaves) == 1 else graph.node("Concat", *leaves, axis=-1)
    output = graph.mlp(x, spec.actor, state_dict)
    if spec.continuous:
        graph.continuous_head(output, spec, state_dict)
    else:
        graph.discrete_head(output, spec)
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "policy",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", spec.observation[n]]) for n in leaves],
            [_output_info(name, spec) for name in spec.outputs],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
        producer_name="ejax",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


class _Graph:
    """Nodes and constants so far. Each method adds some and returns the name of their result."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def node(self, op: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        output = output or f"_{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def constant(self, value: ArrayLike, dtype: type = np.float32) -> str:
        name = f"_constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype), name))
        return name

    def mlp(self, x: str, network: NetworkSpec, weights: Mapping[str, NDArray[np.float32]]) -> str:
        if network.normalized:
            scale = weights["actor_obs_normalizer.standard_deviation"] + np.float32(1e-2)
            x = self.node("Sub", x, self.constant(weights["actor_obs_normalizer.mean"].reshape(1, -1)))
            x = self.node("Div", x, self.constant(scale.reshape(1, -1)))
        for i in range(len(network.hidden_sizes)):
            x = self.linear(x, f"actor.{i * network.stride}", weights)
            if network.use_layernorm:
                norm = f"actor.{i * network.stride + 1}"
                scale_and_bias = [self.constant(weights[f"{norm}.{part}"]) for part in ("weight", "bias")]
                x = self.node("LayerNormalization", x, *scale_and_bias, axis=-1, epsilon=1e-5)
            x = self.activation(x, network.activation)
        x = self.linear(x, f"actor.{len(network.hidden_sizes) * network.stride}", weights)
        return self.activation(x, network.last_activation or "none")

    def linear(self, x: str, name: str, weights: Mapping[str, NDArray[np.float32]]) -> str:
        parameters = [self.constant(weights[f"{name}.{part}"]) for part in ("weight", "bias")]
        return self.node("Gemm", x, *parameters, transB=1)

    def activation(self, x: str, name: str) -> str:
        if name in _SIMPLE_ACTIVATIONS:
            return self.node(_SIMPLE_ACTIVATIONS[name], x)
        if name in ("silu", "swish"):
            return self.node("Mul", x, self.node("Sigmoid", x))
        if name == "gelu":  # x/2 · (1 + erf(x/√2))
            erf = self.node("Erf", self.node("Mul", x, self.constant(math.sqrt(0.5))))
            half = self.node("Mul", x, self.constant(0.5))
            return self.node("Mul", half, self.node("Add", erf, self.constant(1.0)))
        raise ValueError(f"no ONNX form of the activation {name!r}")

    def continuous_head(self, mean: str, spec: PolicySpec, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self.node("Identity", mean, output="mean")
        log_std = np.clip(weights["log_std"], *spec.log_std_range).reshape(1, -1)
        self.node("Expand", self.constant(log_std), self.node("Shape", mean), output="log_std")
        action = mean
        if spec.head == "tanh_normal":
            low, high = (np.asarray(bound, np.float32).reshape(1, -1) for bound in (spec.low, spec.high))
            scaled = self.node("Mul", self.node("Tanh", mean), self.constant((high - low) / 2))
            action = self.node("Add", scaled, self.constant((low + high) / 2))
        if spec.clip is not None:
            clip_low, clip_high = (self.constant(np.asarray(bound).reshape(1, -1)) for bound in spec.clip)
            action = self.node("Min", self.node("Max", action, clip_low), clip_high)
        self.node("Identity", action, output="action")

    def discrete_head(self, logits: str, spec: PolicySpec) -> None:
        self.node("Identity", logits, output="logits")
        if spec.head == "categorical":
            choice = self.node("ArgMax", logits, axis=-1, keepdims=0)
        else:
            parts = [f"_logits_{i}" for i in range(len(spec.sizes))]
            sizes = self.constant(spec.sizes, np.int64)
            self.nodes.append(helper.make_node("Split", [logits, sizes], parts, axis=-1))
            choice = self.node("Concat", *(self.node("ArgMax", part, axis=-1, keepdims=1) for part in parts), axis=-1)
        self.node("Cast", choice, output="action", to=TensorProto.INT32)


def _output_info(name: str, spec: PolicySpec) -> onnx.ValueInfoProto:
    kind = TensorProto.INT32 if name == "action" and not spec.continuous else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, ["batch", *spec.output_shape(name)])
