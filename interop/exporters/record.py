"""Record of a policy class outside JAX: its spec, its weights in torch's names, its actor alone, its test cases."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejax.policies.heads import injected
from ejax.policies.record import find_policy
from ejax.runtime.tree_text import named_leaves
from ejax.schema.registry import entries, import_entry
from ejax.types import Array, Env, HostEnv, Params, Policy, PyTree
from interop.artefacts.cases import draw_cases, leaves_of, nest_inputs, paths_of, plain_answer
from interop.exporters.entries import Entry, StateDict
from interop.standalone_verify import Arrays, Case
from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY, Paths, PolicySpec


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """Functions by which the policies of a class leave JAX, and come back."""

    describe: Callable[[Any, Mapping[str, Any], Paths], tuple[Any, Spec]]
    """``(policy, shapes of one observation by path, paths) -> (the policy as exported, its spec)``, ``paths`` being
    the spec's; raises ValueError."""
    exported_params: Callable[[Any, Params], Params] = lambda policy, params: params
    """``(policy, parameters) -> parameters`` of the policy that ``describe`` gives, where that is of another class."""
    actor_of: Callable[[Any], Any]
    """``policy -> policy`` without its critic, and so without the observations that only the critic sees."""
    actor_params: Callable[[Any, Params], Params] = lambda policy, params: params
    """``(policy, parameters) -> parameters`` that the actor's, and those of a critic, are among."""
    tensors: Callable[[Any], Iterator[Entry]] | None = None
    """Every tensor of the policy's state_dict, in torch's order. None: ``state_dict`` alone, and no way back."""
    state_dict: Callable[[Any, Params], StateDict] | None = None
    """None: made of ``tensors``."""
    policy_of: Callable[[PolicySpec], Any] = lambda spec: None
    """``spec -> actor``, the inverse of ``describe``. None: the spec is another class's."""
    observation: Callable[[Any, dict[str, Array]], PyTree] = lambda spec, inputs: nest_inputs(inputs, spec.paths)
    """``(spec, inputs of a deployed policy but its memory) -> observation`` that the actor takes."""
    draw_cases: Callable[..., list[Case]] = draw_cases
    """As ``interop.artefacts.cases.draw_cases``."""
    documents: Callable[[Any, Arrays], dict[str, Any]] = lambda policy, seen: {}
    """``(policy, observations) -> {file: content}`` of further files."""
    facts: Callable[[Any], dict[str, Any]] = lambda policy: {}
    """``trained policy -> entries`` of parity.json."""


def exporter_of(policy: Policy) -> Exporter:
    """Return the record of a policy's class. Raises TypeError: it has none."""
    exporters = _exporters()
    for name, network in injected(policy).items():
        text = f"its {name} is a module of your own ({type(network).__name__}), and torch has no counterpart; use a"
        text += " NetworkConfig, or put the module into a policy class whose record names an Exporter (docs/extend.md)"
        raise TypeError(text)
    for kind in exporters:
        if isinstance(policy, kind):
            return import_entry(exporters, kind)
    names = ", ".join(kind.__name__ for kind in exporters)
    raise TypeError(f"{type(policy).__name__} has no counterpart in torch; {names} have")


def exporter_of_any(policy: Policy) -> Exporter:
    """Return a policy's record, or that of custom policies where its class has none."""
    try:
        return exporter_of(policy)
    except TypeError:
        return import_entry({"own": "interop.exporters.own:EXPORTER"}, "own")


def actor_function(exporter: Exporter, policy: Any, params: Params, spec: Spec) -> partial[tuple[Array, ...]]:
    """Make the deployed actor, ``(parameters, *spec.inputs) -> spec.outputs``, with the parameters given."""
    actor = exporter.actor_of(policy)

    def deployed(params: Params, *leaves: Array) -> tuple[Array, ...]:
        with jax.default_matmul_precision("highest"):  # on an NVIDIA GPU the default rounds to TF32
            inputs = dict(zip(spec.inputs, leaves, strict=True))
            memory = inputs.pop(MEMORY) if spec.remembers else None
            # not as a program in the program: of that, what no output needs would be kept, such as a critic
            return plain_answer(actor, params, exporter.observation(spec, inputs), spec, memory)

    return partial(deployed, exporter.actor_params(policy, params))


def named_weights(params: Params) -> StateDict:
    """Name the arrays of parameters as JAX does; random keys, which nothing that acts reads, are left out."""
    arrays = {name: x for name, x in named_leaves(params).items() if hasattr(x, "shape")}
    return {name: np.asarray(x) for name, x in arrays.items() if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}


def spec_of(policy: Policy, env: Env | HostEnv) -> Any:
    """Make the spec of a policy: everything that its twin needs except the weights. Raises TypeError: it has no twin.
    ValueError: an observation that no export takes."""
    return described(exporter_of(policy), policy, env)[1]


def described(exporter: Exporter, policy: Policy, env: Env | HostEnv) -> tuple[Any, Any]:
    """Return the policy as exported, and its spec, for an environment's observations; raises ValueError."""
    return exporter.describe(policy, observed(env), paths_of(_observation(env)))


def policy_of(spec: PolicySpec) -> Any:
    """Make the actor that a spec describes; the inverse of ``spec_of``."""
    exporters = _exporters()
    found = (import_entry(exporters, kind).policy_of(spec) for kind in exporters)
    return next(policy for policy in found if policy is not None)


def observed(env: Env | HostEnv) -> dict[str, Any]:
    """Shapes and dtypes of one observation's arrays, by path."""
    return leaves_of(_observation(env))


def _observation(env: Env | HostEnv) -> Any:
    return env.observation_space if isinstance(env, HostEnv) else jax.eval_shape(env.reset, jax.random.key(0))[1]


def _exporters() -> dict[type, str]:
    return {kind: place for name in entries("policy") for kind, place in find_policy(name).exporters.items()}
