"""The policy of an export as ejax's own again: the actor, with its weights."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from ejax.distributions import action_spec
from ejax.policies.pretrained.weights import load_weights
from ejax.training.environments import sample_obs
from ejax.types import Env, HostEnv, Params, Policy
from interop.artefacts.cases import leaves_of
from interop.artefacts.formats import FORMATS
from interop.checkpoints.weights import params_from_state_dict
from interop.exporters.record import policy_of
from interop.standalone_verify import ParityError, check_files, read_certificate
from interop.twin.kinds import load_spec
from interop.twin.spec import PolicySpec

_WEIGHTS = ("safetensors", "pt")
"""Formats of weights alone."""


def read_export(folder: Path, env: Env | HostEnv) -> tuple[Any, Params]:
    """``(policy, parameters)`` of an export, without its critic. ``env``: whose observations it is to read, and whose
    actions it is to take. Raises ValueError: a file that was changed, an export without weights, a policy that reads
    text, or one that reads or does what the environment has not."""
    report = read_certificate(folder)
    try:
        check_files(folder, report)
    except ParityError as error:
        raise ValueError(str(error)) from error
    spec = load_spec(folder / "policy.json")
    if not isinstance(spec, PolicySpec):
        raise ValueError(f"{folder} holds the program of a policy; use its run, or a checkpoint of it")
    form = next((form for form in _WEIGHTS if form in report["artefacts"]), None)
    if form is None:
        raise ValueError(f"{folder} holds no weights alone; export with --formats {','.join(_WEIGHTS)}")
    _check_spaces(spec, env)
    policy: Any = policy_of(spec)
    weights = load_weights(folder / FORMATS[form].file)
    actors = {name: x for name, x in weights.items() if not name.startswith("critic")}
    params = jax.tree.map(jnp.asarray, params_from_state_dict(cast(Policy, policy), actors))
    wanted = jax.eval_shape(policy.init, jax.random.key(0), sample_obs(env, 1))
    shapes, wanted_shapes = (jax.tree.map(lambda x: x.shape, tree) for tree in (params, wanted))
    if shapes != wanted_shapes:
        raise ValueError(f"{folder} holds weights of another policy than its policy.json, of other shapes")
    return policy, params


def _check_spaces(spec: PolicySpec, env: Env | HostEnv) -> None:
    """Refuse a policy for other observations or actions than the environment's. Raises ValueError: a part that the
    policy reads is missing or of another shape, or actions of another number."""
    there = {name: tuple(space.shape) for name, space in leaves_of(env.observation_space).items()}
    wanted: dict[str, tuple[int, ...]] = {name: (spec.observation[name],) for name in spec.actor.inputs}
    wanted |= {name: tuple(shape) for name, shape in spec.images.items()}
    if spec.encoder is not None:  # which reads all numbers there are
        wanted |= {name: (width,) for name, width in spec.observation.items()}
    for name, shape in wanted.items():
        if there.get(name) != shape:
            has = ", ".join(f"{name} {list(shape)}" for name, shape in there.items())
            raise ValueError(f"the exported policy reads '{name}' {list(shape)}; the observation has {has}")
    acted = action_spec(env.action_space)
    if (acted.continuous, acted.sizes) != (spec.continuous, tuple(spec.sizes)):
        text = f"the exported policy acts by {spec.head} {list(spec.sizes)}"
        raise ValueError(f"{text}, the environment takes {env.action_space}")
