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

from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY, NEXT_MEMORY, MemorySpec, NetworkSpec, PolicySpec, encoder_name

OPSET = 17
_IR_VERSION = 8
_SIMPLE_ACTIVATIONS = {"relu": "Relu", "elu": "Elu", "tanh": "Tanh", "none": "Identity"}


def make_onnx(spec: PolicySpec, state_dict: Mapping[str, NDArray[np.float32]]) -> onnx.ModelProto:
    """The deployed policy: inputs ``spec.inputs`` [batch, ...], outputs ``spec.outputs``, both by name."""
    graph = Graph()
    seen = [graph.encoder(name, spec, state_dict) for name in spec.images]
    if spec.memory is not None:
        numbers = [graph.remember(spec, spec.memory, state_dict)]
    else:
        numbers = [graph.numbers(spec, state_dict)] if spec.actor.inputs else []
    output = graph.mlp(graph.concat(*seen, *numbers), spec.actor, state_dict)
    if spec.continuous:
        graph.continuous_head(output, spec, state_dict)
    else:
        graph.discrete_head(output, spec)
    return finish(graph, spec)


class Graph:
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

    def concat(self, *parts: str) -> str:
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=-1)

    def split(self, x: str, parts: int, axis: int) -> list[str]:
        """Equal parts."""
        names = [f"_Split_{len(self.nodes)}_{i}" for i in range(parts)]
        self.nodes.append(helper.make_node("Split", [x], names, axis=axis))
        return names

    def encoder(self, name: str, spec: PolicySpec, weights: Mapping[str, NDArray[np.float32]]) -> str:
        """The places where an image's channels are active: [batch, 2·channels]."""
        encoder = spec.encoder
        if encoder is None:
            raise ValueError(f"the policy spec has the image '{name}', but no encoder")
        x = self.node("Transpose", self.pixels(name), perm=[0, 3, 1, 2])
        for i, (stride, (before, behind)) in enumerate(zip(encoder.strides, encoder.padding, strict=True)):
            parameters = [self.constant(weights[f"{encoder_name(name)}.{i}.{part}"]) for part in ("weight", "bias")]
            pads = [before, before, behind, behind]
            x = self.node("Relu", self.node("Conv", x, *parameters, strides=[stride, stride], pads=pads))
        place = self.places(x, *encoder.places(*spec.images[name][:2]))
        return self.node("Flatten", self.node("Transpose", place, perm=[0, 2, 1]), axis=1)

    def pixels(self, name: str) -> str:
        """x/127.5 − 1"""
        x = self.node("Cast", name, to=TensorProto.FLOAT)
        return self.node("Sub", self.node("Div", x, self.constant(127.5)), self.constant(1.0))

    def places(self, x: str, rows: int, columns: int) -> str:
        """Mean active position of each channel of [batch, channels, rows, columns]: [batch, channels, 2]."""
        flat = self.node("Reshape", x, self.constant((0, 0, rows * columns), np.int64))  # 0: as it is
        share = self.node("Softmax", flat, axis=-1)
        grid = np.meshgrid(np.linspace(-1.0, 1.0, rows), np.linspace(-1.0, 1.0, columns), indexing="ij")
        return self.node("MatMul", share, self.constant(np.stack(grid, axis=-1).reshape(-1, 2)))

    def numbers(self, spec: PolicySpec, weights: Mapping[str, NDArray[np.float32]]) -> str:
        """The numbers that the actor reads, normalized where the policy does so."""
        return self.normalized(self.concat(*spec.actor.inputs), spec, weights)

    def normalized(self, x: str, spec: PolicySpec, weights: Mapping[str, NDArray[np.float32]]) -> str:
        if not spec.actor.normalized:
            return x
        mean, deviation = (
            weights[f"actor_obs_normalizer.{part}"][:, list(spec.read_of_all)]
            for part in ("mean", "standard_deviation")
        )
        return self.node("Div", self.node("Sub", x, self.constant(mean)), self.constant(deviation + np.float32(1e-2)))

    def remember(self, spec: PolicySpec, memory: MemorySpec, weights: Mapping[str, NDArray[np.float32]]) -> str:
        """The memory's features for the actor; the output ``next_memory``."""
        if memory.type == "history":
            return self.history(spec, memory, weights)
        x = self.numbers(spec, weights)
        if memory.encoder is not None:
            x = self.mlp(x, memory.encoder, weights, name="actor_encoder")
        states = self.split(MEMORY, memory.depth, axis=-1) if memory.depth > 1 else [MEMORY]
        step = self.gru_step if memory.type == "gru" else self.lstm_step
        after = []
        for layer, state in enumerate(states):
            x, state = step(x, state, layer, weights)
            after.append(state)
        self.node("Identity", self.concat(*after), output=NEXT_MEMORY)
        return x

    def gates(self, x: str, kind: str, layer: int, weights: Mapping[str, NDArray[np.float32]]) -> str:
        parameters = [self.constant(weights[f"actor_memory.{part}_{kind}_l{layer}"]) for part in ("weight", "bias")]
        return self.node("Gemm", x, *parameters, transB=1)

    def gru_step(self, x: str, state: str, layer: int, weights: Mapping[str, NDArray[np.float32]]) -> tuple[str, str]:
        reset, update, new = self.split(self.gates(x, "ih", layer, weights), 3, axis=-1)
        own_reset, own_update, own_new = self.split(self.gates(state, "hh", layer, weights), 3, axis=-1)
        update = self.node("Sigmoid", self.node("Add", update, own_update))
        reset = self.node("Sigmoid", self.node("Add", reset, own_reset))
        new = self.node("Tanh", self.node("Add", new, self.node("Mul", reset, own_new)))
        rest = self.node("Sub", self.constant(1.0), update)
        state = self.node("Add", self.node("Mul", rest, new), self.node("Mul", update, state))
        return state, state

    def lstm_step(self, x: str, state: str, layer: int, weights: Mapping[str, NDArray[np.float32]]) -> tuple[str, str]:
        hidden, cell = self.split(state, 2, axis=-1)
        given = self.node("Add", self.gates(x, "ih", layer, weights), self.gates(hidden, "hh", layer, weights))
        add, keep, new, show = self.split(given, 4, axis=-1)
        kept = self.node("Mul", self.node("Sigmoid", keep), cell)
        cell = self.node("Add", kept, self.node("Mul", self.node("Sigmoid", add), self.node("Tanh", new)))
        hidden = self.node("Mul", self.node("Sigmoid", show), self.node("Tanh", cell))
        return hidden, self.concat(hidden, cell)

    def history(self, spec: PolicySpec, memory: MemorySpec, weights: Mapping[str, NDArray[np.float32]]) -> str:
        length, width = memory.length, sum(spec.observation[name] for name in spec.actor.inputs)
        x = self.node("Unsqueeze", self.concat(*spec.actor.inputs), self.constant([1], np.int64))
        sizes = self.constant([memory.size - 1, 1], np.int64)
        past, count = f"_past_{len(self.nodes)}", f"_count_{len(self.nodes)}"
        self.nodes.append(helper.make_node("Split", [MEMORY, sizes], [past, count], axis=-1))
        past = self.node("Reshape", past, self.constant((0, length - 1, width), np.int64))
        together = self.node("Concat", past, x, axis=1)
        count = self.node("Round", count)
        gap = self.node("Unsqueeze", self.node("Sub", self.constant(length - 1.0), count), self.constant([2], np.int64))
        ones = self.constant(np.ones((1, 1, width)), np.int64)
        index = self.node("Mul", self.node("Cast", gap, to=TensorProto.INT64), ones)
        oldest = self.node("GatherElements", together, index, axis=1)
        place = self.constant(np.arange(length).reshape(1, length, 1))
        window = self.node("Where", self.node("Less", place, gap), oldest, together)
        one, end = self.constant([1], np.int64), self.constant([length], np.int64)
        kept = self.node("Flatten", self.node("Slice", together, one, end, one), axis=1)
        count = self.node("Min", self.node("Add", count, self.constant(1.0)), self.constant(length - 1.0))
        self.node("Concat", kept, count, output=NEXT_MEMORY, axis=-1)
        window = self.node("Reshape", window, self.constant((-1, width), np.int64))
        return self.node(
            "Reshape", self.normalized(window, spec, weights), self.constant((-1, length * width), np.int64)
        )

    def mlp(self, x: str, network: NetworkSpec, weights: Mapping[str, NDArray[np.float32]], name: str = "actor") -> str:
        for i in range(len(network.hidden_sizes)):
            x = self.linear(x, f"{name}.{i * network.stride}", weights)
            if network.use_layernorm:
                norm = f"{name}.{i * network.stride + 1}"
                scale_and_bias = [self.constant(weights[f"{norm}.{part}"]) for part in ("weight", "bias")]
                x = self.node("LayerNormalization", x, *scale_and_bias, axis=-1, epsilon=1e-5)
            x = self.activation(x, network.activation)
        x = self.linear(x, f"{name}.{len(network.hidden_sizes) * network.stride}", weights)
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
        self.mean_and_log_std(mean, spec, weights)
        action = mean
        if spec.head == "tanh_normal":
            low, high = (np.asarray(bound, np.float32).reshape(1, -1) for bound in (spec.low, spec.high))
            scaled = self.node("Mul", self.node("Tanh", mean), self.constant((high - low) / 2))
            action = self.node("Add", scaled, self.constant((low + high) / 2))
        self.clipped_action(action, spec)

    def mean_and_log_std(self, mean: str, spec: Spec, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self.node("Identity", mean, output="mean")
        log_std = np.clip(weights["log_std"], *spec.log_std_range).reshape(1, -1)
        self.node("Expand", self.constant(log_std), self.node("Shape", mean), output="log_std")

    def clipped_action(self, action: str, spec: Spec) -> None:
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


def finish(graph: Graph, spec: Spec, defaults: Mapping[str, NDArray[np.float32]] | None = None) -> onnx.ModelProto:
    """The model of a graph whose nodes are complete.

    Args:
        defaults: of inputs that may be left out: one row [1, ...] each.
    """
    optional = defaults or {}
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "policy",
            [_input_info(name, spec, f"{name}_rows" if name in optional else "batch") for name in spec.inputs],
            [_output_info(name, spec) for name in spec.outputs],
            [*graph.constants, *(numpy_helper.from_array(x, name) for name, x in optional.items())],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
        producer_name="ejax",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _input_info(name: str, spec: Spec, rows: str) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.input_dtype(name)))
    return helper.make_tensor_value_info(name, kind, [rows, *spec.input_shape(name)])


def _output_info(name: str, spec: Spec) -> onnx.ValueInfoProto:
    kind = TensorProto.INT32 if name == "action" and not spec.continuous else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, ["batch", *spec.output_shape(name)])
