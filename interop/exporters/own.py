"""Export of custom policies: the program that JAX traces."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.distributions import Categorical, MultiCategorical, Normal, TanhNormal
from ejax.policies.calls import apply_policy, first_memory
from ejax.types import Array, Key, Params, PolicyWithMemory, PyTree
from interop.artefacts.cases import draw_cases, nest_inputs
from interop.exporters.record import Exporter, named_weights
from interop.standalone_verify import Case
from interop.twin.spec import MemorySpec, Paths, ProgramSpec


@dataclass(frozen=True)
class OneMemory:
    """A policy with its memory as one array [..., M] under ``actor``: its leaves one after the other, zeros for an
    episode's first step, also where its own memory begins otherwise."""

    policy: PolicyWithMemory

    def init(self, key: Key, obs: PyTree) -> Params:
        return self.policy.init(key, obs)

    def init_memory(self, num_rows: int) -> PyTree:
        size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: self.policy.init_memory(1))))
        return {"actor": jnp.zeros((num_rows, size))}

    def apply(self, params: Params, obs: PyTree, *, memory: PyTree) -> Any:
        packed, rows = memory["actor"], memory["actor"].shape[:-1]
        first, form = jax.tree.flatten(self.policy.init_memory(1))
        parts = jnp.split(packed, np.cumsum([x.size for x in first])[:-1], axis=-1)
        continues = (packed != 0.0).any(axis=-1)

        def own(part: Array, x: Array) -> Array:
            begun = part.reshape(*rows, *x.shape[1:]).astype(x.dtype)
            flag = continues.reshape(*rows, *[1] * (x.ndim - 1))
            return jnp.where(flag, begun, jnp.broadcast_to(x[0], begun.shape))

        given = jax.tree.unflatten(form, list(map(own, parts, first)))
        distribution, value, after = self.policy.apply(params, obs, memory=given)
        packed_after = [x.reshape(*rows, -1).astype(packed.dtype) for x in jax.tree.leaves(after)]
        return distribution, value, {"actor": jnp.concatenate(packed_after, axis=-1)}


def _describe(policy: Any, leaves: Mapping[str, Any], paths: Paths = ()) -> tuple[Any, ProgramSpec]:
    numbers = {name: int(x.shape[0]) for name, x in leaves.items() if len(x.shape) == 1 and x.dtype.kind == "f"}
    images: Any = {name: tuple(x.shape) for name, x in leaves.items() if len(x.shape) == 3 and x.dtype == np.uint8}
    if others := leaves.keys() - numbers.keys() - images.keys():
        shown = ", ".join(f"{name} {leaves[name].dtype}{list(leaves[name].shape)}" for name in sorted(others))
        text = "an export takes numbers, float32[F], and images, uint8[height, width, channels];"
        raise ValueError(f"{text} the observation has {shown}; let the environment return those as float32[F]")
    memory = None
    if isinstance(policy, PolicyWithMemory):
        policy = OneMemory(policy)
        memory = MemorySpec(type="own", size=policy.init_memory(1)["actor"].shape[1])
    head, sizes = _head(policy, leaves, paths)
    return policy, ProgramSpec(observation=numbers, images=images, memory=memory, head=head, sizes=sizes, paths=paths)


def _head(policy: Any, leaves: Mapping[str, Any], paths: Paths) -> tuple[Any, tuple[int, ...]]:
    """``head`` and ``sizes`` of the policy's distribution, by shapes alone."""
    obs = nest_inputs({name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in leaves.items()}, paths)

    def answer(key: Key, obs: PyTree) -> tuple[Any, Array]:
        distribution = apply_policy(policy, policy.init(key, obs), obs, first_memory(policy, 1))[0]
        return distribution, distribution.mode()

    distribution, action = jax.eval_shape(answer, jax.random.key(0), obs)
    if isinstance(distribution, Categorical):
        return "categorical", (distribution.logits.shape[-1],)
    if isinstance(distribution, MultiCategorical):
        return "multi_categorical", tuple(part.logits.shape[-1] for part in distribution.parts)
    if action.ndim != 2 or not jnp.issubdtype(action.dtype, jnp.floating):
        raise ValueError(
            f"the mode of {type(distribution).__name__} is {action.dtype}{list(action.shape)} for one row; an export "
            "takes actions of numbers [rows, A], and choices by Categorical and MultiCategorical of ejax.distributions"
        )
    heads: dict[Any, str] = {Normal: "normal", TanhNormal: "tanh_normal"}
    return heads.get(type(distribution), "own"), (action.shape[-1],)


def _draw_cases(policy: Any, *rest: Any) -> list[Case]:
    try:
        return draw_cases(policy, *rest)
    except TypeError as error:
        text = "the policy cannot be computed in float64, by which the export finds what rounding may change; let it"
        raise ValueError(f"{text} take its dtypes from its inputs and parameters: {str(error)[:500]}") from error


EXPORTER = Exporter(
    describe=_describe,
    actor_of=lambda policy: policy,
    state_dict=lambda policy, params: named_weights(params),
    draw_cases=_draw_cases,
)
