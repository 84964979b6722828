"""Writes each format of an export. All but StableHLO come from the spec and the state_dict, that is without jax."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ejax.policies import ActorCritic, ActorOnly
from ejax.policies.vision import VisionPolicy
from ejax.policies.vla.policy import VLAPolicy
from ejax.policies.with_memory import ActorCriticWithMemory
from ejax.types import Array, Params, Policy, PyTree
from interop.artefacts.cases import deployed_answer, nest, of_actor
from interop.artefacts.vla_cases import of_tokens
from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY
from interop.twin.vla_spec import TOKENS, VLASpec


@dataclass(frozen=True)
class Trained:
    """A policy in each form that a writer may need."""

    policy: ActorCritic | ActorOnly | ActorCriticWithMemory | VisionPolicy | VLAPolicy
    params: Params
    spec: Spec
    state_dict: Mapping[str, NDArray[Any]]
    """The state_dict with EmbodiChain's keys, see ``interop.checkpoints.weights``."""
    global_step: int
    """Environment steps it was trained for."""


def write_pt(path: Path, trained: Trained) -> None:
    """The layout of EmbodiChain's checkpoints, critic included."""
    import torch

    tensors = {name: torch.from_numpy(np.array(x)) for name, x in trained.state_dict.items()}
    torch.save({"global_step": trained.global_step, "policy": tensors}, path)


def write_safetensors(path: Path, trained: Trained) -> None:
    """The state_dict, critic included; the spec is in the file's metadata."""
    from safetensors.numpy import save

    arrays = {name: np.array(x, order="C") for name, x in trained.state_dict.items()}  # also of no axes
    metadata = {"global_step": str(trained.global_step), "policy": trained.spec.to_json()}
    path.write_bytes(save(arrays, metadata=metadata))  # ``save_file`` makes a file that its owner alone may read


def write_pt2(path: Path, trained: Trained) -> None:
    """``torch.export`` of the deployed actor."""
    import torch

    leaves = _example_leaves(trained.spec)
    batch = torch.export.Dim("batch", min=1)
    shapes = (tuple({0: batch} for _ in leaves),)  # one entry for the variadic argument
    torch.export.save(torch.export.export(_deployed_twin(trained), leaves, dynamic_shapes=shapes), path)


def write_torchscript(path: Path, trained: Trained) -> None:
    """A trace of the deployed actor."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates TorchScript; robots still load it
        torch.jit.trace(_deployed_twin(trained), _example_leaves(trained.spec)).save(path)


def write_onnx(path: Path, trained: Trained) -> None:
    """See ``interop.artefacts.onnx_graph`` and ``onnx_vla``."""
    from interop.artefacts.onnx_graph import make_onnx
    from interop.artefacts.onnx_vla import make_vla_onnx

    spec, state_dict = trained.spec, trained.state_dict
    model = make_vla_onnx(spec, state_dict) if isinstance(spec, VLASpec) else make_onnx(spec, state_dict)
    path.write_bytes(model.SerializeToString())


def write_stablehlo(path: Path, trained: Trained) -> None:
    """``jax.export`` of the deployed actor, for CPU and CUDA. jax promises to read it for six months."""
    spec = trained.spec
    policy, params = _actor_of(trained)

    def deployed(*leaves: Array) -> tuple[Array, ...]:
        with jax.default_matmul_precision("highest"):  # on an NVIDIA GPU the default rounds to TF32
            inputs = dict(zip(spec.inputs, leaves, strict=True))
            memory = inputs.pop(MEMORY) if isinstance(policy, ActorCriticWithMemory) else None
            return deployed_answer(policy, params, _whole(spec, inputs), spec.clip, memory)

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [
        jax.ShapeDtypeStruct((batch, *spec.input_shape(name)), jnp.dtype(spec.input_dtype(name)))
        for name in spec.inputs
    ]
    path.write_bytes(jax.export.export(jax.jit(deployed), platforms=("cpu", "cuda"))(*shapes).serialize())


WRITERS: dict[str, Callable[[Path, Trained], None]] = {
    "pt": write_pt,
    "safetensors": write_safetensors,
    "pt2": write_pt2,
    "onnx": write_onnx,
    "torchscript": write_torchscript,
    "stablehlo": write_stablehlo,
}


def _actor_of(trained: Trained) -> tuple[Policy, Params]:
    """The policy without its critic, and so without the observations that only the critic sees, and its parameters.

    One with adapters becomes the policy with merged weights, and one that reads text takes tokens.
    """
    policy: Any = trained.policy
    params = trained.params
    if isinstance(policy, VLAPolicy):
        params = policy.merge(params)
        policy = of_tokens(policy)
    elif isinstance(policy, VisionPolicy):
        policy = policy.clone(critic=None)
    elif isinstance(policy, ActorCriticWithMemory):
        policy = of_actor(policy)
    else:
        policy = ActorOnly(
            action_spec=policy.action_spec,
            actor=policy.actor,
            log_std_range=policy.log_std_range,
            actor_obs_groups=policy.actor_obs_groups,
            actor_obs_normalization=policy.actor_obs_normalization,
        )
    kept = {
        collection: {name: x for name, x in tree.items() if not name.startswith("critic")}
        for collection, tree in params.items()
    }
    return policy, kept


def _whole(spec: Spec, inputs: dict[str, Array]) -> PyTree:
    """An observation of these inputs, with zeros for the parts that the actor does not read."""
    if isinstance(spec, VLASpec):
        return {spec.text if name == TOKENS else name: x for name, x in inputs.items()}
    if not spec.images:
        return nest(inputs)
    leaves = {name: inputs[name] for name in spec.images}
    rows = next(iter(inputs.values())).shape[:1]
    for name, width in spec.observation.items():
        leaves[name] = jnp.zeros((*rows, width))
        if name in inputs:
            leaves[name] = leaves[name].at[:, np.array(spec.read(name))].set(inputs[name])
    return nest(leaves)


def _deployed_twin(trained: Trained) -> Any:
    from interop.policy import deployed

    return deployed(trained.spec, trained.state_dict).eval()


def _example_leaves(spec: Spec) -> tuple[Any, ...]:
    """An example batch of 3: a size of 1 would be taken for a constant."""
    import torch

    return tuple(
        torch.zeros(3, *spec.input_shape(name), dtype=getattr(torch, spec.input_dtype(name))) for name in spec.inputs
    )
