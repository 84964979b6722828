"""An ONNX graph of a vision-language-action policy, node by node, as ``interop.twin.vla`` has its modules.

The flow's steps are written out one after the other; their weights are in the file once.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from interop.artefacts.onnx_graph import Graph, finish
from interop.twin.vla_spec import NOISE, TOKENS, UNREAD, BlockSpec, VLASpec, same_padding

Weights: TypeAlias = Mapping[str, NDArray[np.float32]]
Context: TypeAlias = tuple[list[tuple[str, str]], str, str]
"""Keys and values [batch, H, P, d] of each block, which tokens there are, [batch, P] bool, and the token of the numbers
[batch, 1, W]."""


def make_vla_onnx(spec: VLASpec, weights: Weights) -> onnx.ModelProto:
    """The deployed policy: inputs ``spec.inputs`` [batch, ...], outputs ``spec.outputs``, both by name.

    ``noise`` may be left out: zeros.
    """
    graph = Graph()
    network = _Network(graph, spec, weights)
    context = network.encode()
    flat = graph.constant((0, spec.sizes[0]), np.int64)
    if spec.head == "flow":
        end = graph.node("Identity", graph.node("Reshape", network.flow(context), flat), output="unclipped")
        graph.clipped_action(end, spec)
        return finish(graph, spec, {NOISE: np.zeros((1, spec.sizes[0]), np.float32)})
    mean = graph.node("Reshape", network.suffix(context, network.every_row(network.one_row("action_place"), 2)), flat)
    graph.mean_and_log_std(mean, spec, weights)
    graph.clipped_action(mean, spec)
    return finish(graph, spec)


class _Network:
    """Adds the network's parts to a graph; each method returns the name of its result."""

    def __init__(self, graph: Graph, spec: VLASpec, weights: Weights) -> None:
        self.graph, self.spec, self.weights = graph, spec, weights
        self.node = graph.node
        self._named: dict[str, str] = {}
        self._rows: str | None = None

    def encode(self) -> Context:
        """The suffix's inputs from an observation."""
        spec, node = self.spec, self.node
        text, present = self._text()
        share = node("Unsqueeze", node("Cast", present, to=TensorProto.FLOAT), self._shape(2))
        summary = node("ReduceSum", node("Mul", text, share), self._shape(1), keepdims=0)
        if spec.text_mean:
            words = node("ReduceSum", share, self._shape(1), keepdims=0)
            summary = node("Div", summary, node("Max", words, self.graph.constant(np.float32(1.0))))
        tokens, numbers, count = [], [self._numbers()], 0
        for name, shape in spec.images.items():
            token, places = self._image(name, summary)
            tokens.append(token)
            numbers += [places] if places is not None else []
            count += spec.image_encoder.count(shape)
        number = self._silu(self.linear(self.graph.concat(*numbers), "number_in"))
        number = node("Unsqueeze", self.linear(number, "number_out"), self._shape(1))
        x = node("Concat", *tokens, text, number, axis=1)
        there = node("Concat", *([self._all(count)] if count else []), present, self._all(1), axis=1)
        caches = []
        for i in range(spec.depth):
            x, cache = self._block(x, there, None, f"blocks_{i}")
            caches.append(cache)
        return caches, there, number

    def flow(self, context: Context) -> str:
        """[batch, K, A]: where the flow leads from the noise."""
        spec, node = self.spec, self.node
        x = node("Reshape", NOISE, self._shape(-1, spec.horizon, spec.action_dim))
        x = self.every_row(x, 2)
        time = self.linear(self.graph.constant(spec.time_features), "time_in")
        time = self.linear(self._silu(time), "time_out")
        step = self.graph.constant(np.float32(1.0 / spec.num_steps))
        for number in range(spec.num_steps):
            mine = node("Gather", time, self.graph.constant(number, np.int64), axis=0)
            tokens = node("Add", self.linear(x, "action_in"), self.one_row("action_place"))
            away = node("Sub", self.suffix(context, node("Add", tokens, mine)), x)
            velocity = node("Div", away, self.graph.constant(spec.time_left[number]))
            x = node("Add", x, node("Mul", step, velocity))
        return x

    def suffix(self, context: Context, x: str) -> str:
        """[batch, K, A]"""
        caches, there, number = context
        x = self.node("Add", x, number)
        both = self.node("Concat", there, self._all(self.spec.horizon), axis=1)
        for i, cache in enumerate(caches):
            x, _ = self._block(x, both, cache, f"blocks_{i}")
        return self.linear(self._norm(x, "norm"), "action_out")

    def one_row(self, name: str) -> str:
        """A parameter as [1, ...]."""
        return self._weight(name, self.weights[name][None])

    def every_row(self, x: str, rank: int) -> str:
        """[1, ...] or [batch, ...] as [batch, ...], with ``rank`` axes behind the first."""
        shape = self.node("Concat", self._batch(), self._shape(*[1] * rank), axis=0)
        return self.node("Expand", x, shape)

    def linear(self, x: str, name: str) -> str:
        """[..., in] -> [..., out]"""
        product = self.node("MatMul", x, self._weight(f"{name}.weight", self.weights[f"{name}.weight"].T))
        return self.node("Add", product, self._weight(f"{name}.bias"))

    def _text(self) -> tuple[str, str]:
        """Tokens of the instruction [batch, T, W], and which there are."""
        node = self.node
        if not self.spec.sentences:
            text = node("Gather", self._weight("word_embedding.weight"), TOKENS, axis=0)
            unread = self.graph.constant(UNREAD, np.int32)
            return node("Add", text, self.one_row("word_place")), node("Greater", TOKENS, unread)
        known = self.graph.constant(np.array(self.spec.sentence_tokens)[None], np.int32)
        same = node("Equal", node("Unsqueeze", TOKENS, self._shape(1)), known)  # [batch, S, max_words]
        other = node("ReduceMax", node("Cast", node("Not", same), to=TensorProto.INT32), axes=[2], keepdims=0)
        is_it = node("Cast", node("Equal", other, self.graph.constant(0, np.int32)), to=TensorProto.INT32)
        row = node(
            "Gather", self._weight("sentence_tokens.sentences"), node("ArgMax", is_it, axis=1, keepdims=0), axis=0
        )
        any_of_them = node("Cast", node("ReduceMax", is_it, axes=[1], keepdims=1), to=TensorProto.FLOAT)
        token = self.linear(node("Mul", row, any_of_them), "sentence_tokens.project")
        return node("Unsqueeze", token, self._shape(1)), self._all(1)

    def _numbers(self) -> str:
        x = self.graph.concat(*self.spec.observation)
        if not self.spec.normalized:
            return x
        mean, variance = (self.weights[f"normalizer.{part}"][None] for part in ("mean", "variance"))
        centred = self.node("Sub", x, self.graph.constant(mean))
        return self.node("Div", centred, self.graph.constant(np.sqrt(variance) + np.float32(1e-2)))

    def _image(self, name: str, summary: str) -> tuple[str, str | None]:
        kind, module = self.spec.image_encoder.kind, f"encoders_{name}"
        if kind == "keypoints":
            return self._keypoints(name, module, summary)
        return (self._patches if kind == "patches" else self._efficientnet)(name, module), None

    def _keypoints(self, name: str, module: str, summary: str) -> tuple[str, str]:
        """[batch, channels, W], places [batch, 2·channels]."""
        node, encoder, c = self.node, self.spec.image_encoder, self.spec.image_encoder.convolutions
        if c is None:
            raise ValueError("the policy spec has no convolutions")
        x = node("Transpose", self.graph.pixels(name), perm=[0, 3, 1, 2])
        grey = node("ReduceMean", x, axes=[1], keepdims=1)
        x = node("Concat", x, node("Mul", node("Sub", x, grey), self.graph.constant(encoder.colour)), axis=1)
        for i, (size, kernel, stride) in enumerate(zip(c.channels, c.kernels, c.strides, strict=True)):
            before, behind = c.padding[i]
            weight = self.weights[f"{module}.conv_{i}.weight"].reshape(size, kernel, kernel, -1).transpose(0, 3, 1, 2)
            parameters = [self.graph.constant(weight), self._weight(f"{module}.conv_{i}.bias")]
            seen = node("Relu", x) if i > 0 else x
            pads = [before, before, behind, behind]
            x = node("Conv", seen, *parameters, strides=[stride, stride], pads=pads)
            if i > 0:
                film = node("Reshape", self.linear(summary, f"{module}.film_{i}"), self._shape(0, 2 * size, 1, 1))
                scale, shift = self.graph.split(film, 2, axis=1)
                x = node("Add", node("Mul", x, node("Add", scale, self.graph.constant(1.0))), shift)
        sharp = node("Mul", x, self.graph.constant(encoder.sharpness))
        place = self.graph.places(sharp, *c.places(*self.spec.images[name][:2]))
        product = node("MatMul", node("Unsqueeze", place, self._shape(2)), self._weight(f"{module}.kernel"))
        tokens = node("Add", node("Squeeze", product, self._shape(2)), self.one_row(f"{module}.bias"))
        return tokens, node("Flatten", node("Transpose", place, perm=[0, 2, 1]), axis=1)

    def _patches(self, name: str, module: str) -> str:
        size, (height, width, depth) = self.spec.image_encoder.patch_size, self.spec.images[name]
        rows, columns = height // size, width // size
        x = self.node("Reshape", self.graph.pixels(name), self._shape(-1, rows, size, columns, size, depth))
        x = self.node("Transpose", x, perm=[0, 1, 3, 2, 4, 5])
        x = self.node("Reshape", x, self._shape(-1, rows * columns, size * size * depth))
        return self.node("Add", self.linear(x, f"{module}.patch"), self.one_row(f"{module}.place"))

    def _efficientnet(self, name: str, module: str) -> str:
        node, features, (height, width, _) = self.node, f"{module}.features", self.spec.images[name]
        x = node("Transpose", node("Cast", name, to=TensorProto.FLOAT), perm=[0, 3, 1, 2])
        x = node("Div", node("Sub", x, self.graph.constant(127.0)), self.graph.constant(128.0))
        x = self._relu6(self._conv(x, f"{features}.stem", (height, width), 3, 2))
        shape, channels = (math.ceil(height / 2), math.ceil(width / 2)), 32
        for i, block in enumerate(self.spec.image_encoder.blocks):
            x = self._bottleneck(x, f"{features}.block_{i}", shape, channels, block)
            shape = (math.ceil(shape[0] / block.stride), math.ceil(shape[1] / block.stride))
            channels = block.channels
        x = node("Transpose", node("Reshape", x, self._shape(0, channels, shape[0] * shape[1])), perm=[0, 2, 1])
        return node("Add", self.linear(x, f"{module}.project"), self.one_row(f"{module}.place"))

    def _bottleneck(self, x: str, module: str, shape: tuple[int, int], channels: int, block: BlockSpec) -> str:
        inside = self._relu6(self._conv(x, f"{module}.expand", shape, 1, 1)) if block.expand > 1 else x
        groups = block.expand * channels
        inside = self._relu6(self._conv(inside, f"{module}.depthwise", shape, block.kernel, block.stride, group=groups))
        out = self._conv(inside, f"{module}.project", shape, 1, 1)
        return self.node("Add", out, x) if block.stride == 1 and block.channels == channels else out

    def _conv(self, x: str, name: str, shape: tuple[int, int], kernel: int, stride: int, **attributes: Any) -> str:
        weight = self.weights[f"{name}.weight"].reshape(*self.weights[f"{name}.weight"].shape[:2], kernel, kernel)
        parameters = [self.graph.constant(weight), self._weight(f"{name}.bias")]
        (top, bottom), (left, right) = (same_padding(length, kernel, stride) for length in shape)
        pads = [top, left, bottom, right]
        return self.node("Conv", x, *parameters, strides=[stride, stride], pads=pads, **attributes)

    def _relu6(self, x: str) -> str:
        return self.node("Min", self.node("Relu", x), self.graph.constant(6.0))

    def _block(self, x: str, there: str, past: tuple[str, str] | None, name: str) -> tuple[str, tuple[str, str]]:
        """``interop.twin.vla.Block``. ``there``: [batch, all tokens], those of the past too."""
        spec, node = self.spec, self.node
        heads = self._shape(0, 0, spec.num_heads, spec.width // spec.num_heads)
        each = self.graph.split(self.linear(self._norm(x, f"{name}.norm_attention"), f"{name}.qkv"), 3, axis=-1)
        query, key, value = (node("Transpose", node("Reshape", part, heads), perm=[0, 2, 1, 3]) for part in each)
        keys, values = key, value
        if past is not None:
            keys, values = node("Concat", past[0], key, axis=2), node("Concat", past[1], value, axis=2)
        score = node("MatMul", query, node("Transpose", keys, perm=[0, 1, 3, 2]))
        score = node("Div", score, self.graph.constant(math.sqrt(spec.width // spec.num_heads)))
        seen = node("Unsqueeze", there, self._shape(1, 2))
        share = node("Softmax", node("Where", seen, score, self.graph.constant(-1e30)), axis=-1)
        mixed = node("Transpose", node("MatMul", share, values), perm=[0, 2, 1, 3])
        x = node("Add", x, self.linear(node("Reshape", mixed, self._shape(0, 0, spec.width)), f"{name}.out"))
        hidden = self._gelu(self.linear(self._norm(x, f"{name}.norm_mlp"), f"{name}.mlp_in"))
        return node("Add", x, self.linear(hidden, f"{name}.mlp_out")), (key, value)

    def _silu(self, x: str) -> str:
        return self.node("Mul", x, self.node("Sigmoid", x))

    def _gelu(self, x: str) -> str:
        """x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))"""
        node, constant = self.node, self.graph.constant
        cube = node("Mul", node("Mul", x, x), node("Mul", x, constant(0.044715)))
        bent = node("Tanh", node("Mul", node("Add", x, cube), constant(math.sqrt(2.0 / math.pi))))
        return node("Mul", node("Mul", x, constant(0.5)), node("Add", bent, constant(1.0)))

    def _norm(self, x: str, name: str) -> str:
        parameters = [self._weight(f"{name}.{part}") for part in ("weight", "bias")]
        return self.node("LayerNormalization", x, *parameters, axis=-1, epsilon=1e-5)

    def _all(self, count: int) -> str:
        """[batch, count] of true."""
        shape = self.node("Concat", self._batch(), self._shape(count), axis=0)
        return self.node("Expand", self.graph.constant([[True]], np.bool_), shape)

    def _batch(self) -> str:
        """[1] int64: the number of rows."""
        if self._rows is None:
            self._rows = self.node("Shape", TOKENS, start=0, end=1)
        return self._rows

    def _shape(self, *sizes: int) -> str:
        return self.graph.constant(sizes, np.int64)

    def _weight(self, name: str, value: NDArray[np.float32] | None = None) -> str:
        """A constant that is in the file once."""
        if name not in self._named:
            self._named[name] = self.graph.constant(self.weights[name] if value is None else value)
        return self._named[name]
