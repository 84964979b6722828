"""The bridge between torch and JAX: a JAX function that torch differentiates, and a torch environment that JAX does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

from ejax.distributions import ActionSpec
from ejax.policies import ActorCritic, ActorOnly
from ejax.types import Timestep


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], aux: list[Any], *tensors: torch.Tensor) -> Any:
        out, ctx.vjp, extra = jax.vjp(function, *map(to_jax, tensors), has_aux=True)
        aux.append(extra)
        return tuple(map(to_torch, out))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *map(to_torch, ctx.vjp(tuple(map(to_jax, grads))))


def jax_call(function: Callable[..., Any], *tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Call ``function(*arrays) -> (tuple of float arrays, anything)``; torch's gradients go through JAX."""
    aux: list[Any] = []
    return _Call.apply(function, aux, *tensors), aux[0]


def to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.array(x.detach().numpy())


def to_torch(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


class TorchEnv:
    """One row of a torch environment, for ``jax.vmap``: all rows are stepped together, in a call from the program.

    torch keeps the graph of the steps, from action to action, and JAX that of the policy between them. The gradient of
    a segment arrives step by step, the last one first; after the first step's the environment is detached.
    """

    max_episode_steps = 0

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs = env, env.num_envs
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.steps: list[tuple[torch.Tensor, ...]] = []
        self.adjoint: list[torch.Tensor] = []

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = jax.ShapeDtypeStruct(self.observation_space.shape, jnp.float32)
        obs = jax.pure_callback(self._reset, shape, jax.random.key_data(key), vmap_method="broadcast_all")
        return jnp.zeros(()), obs

    def step(self, state: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, Timestep]:
        obs, reward, terminated, truncated, state = _step(self, action, state)
        return state, Timestep(obs=obs, reward=reward, terminated=terminated, truncated=truncated, info={})

    def _reset(self, key: Any) -> Any:
        self.steps.clear()
        return self.env.reset()[0].detach().numpy()

    def _step(self, action: Any, state: Any) -> Any:
        leaf = torch.tensor(np.array(action), requires_grad=True)
        with torch.enable_grad():  # which torch turns off where it calls JAX
            obs, reward, terminated, truncated, _ = self.env.step(leaf)
        self.steps.append((leaf, obs, reward))
        number = np.full(len(state), len(self.steps) - 1, np.float32)
        arrays = (x.detach().numpy() for x in (obs, reward, terminated, truncated))
        return (*arrays, np.zeros_like(state), number)

    def _gradient(self, number: Any, obs_grad: Any, reward_grad: Any, after: Any) -> Any:
        last = int(number[0])
        leaves = [leaf for leaf, _, _ in self.steps[: last + 1]]
        if not self.adjoint:
            self.adjoint = [torch.zeros_like(leaf) for leaf, _, _ in self.steps]
        pairs = zip(self.steps[last][1:], (obs_grad, reward_grad), strict=True)
        known = [(x, torch.tensor(np.array(grad))) for x, grad in pairs if x.requires_grad]
        outputs, arrived = zip(*known, strict=True)
        grads = torch.autograd.grad(outputs, leaves, arrived, retain_graph=True, allow_unused=True)
        for total, grad in zip(self.adjoint, grads, strict=False):
            total += 0.0 if grad is None else grad
        result = self.adjoint[last].numpy()
        if last == 0:
            self.steps, self.adjoint = [], []
            self.env.detach_state()
        return result, np.zeros_like(after)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(env: TorchEnv, action: jax.Array, state: jax.Array) -> Any:
    return _forward(env, action, state)[0]


def _forward(env: TorchEnv, action: jax.Array, state: jax.Array) -> Any:
    number, flag = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
    obs = jax.ShapeDtypeStruct(env.observation_space.shape, jnp.float32)
    shapes = (obs, number, flag, flag, number, number)
    *out, number = jax.pure_callback(env._step, shapes, action, state, vmap_method="broadcast_all")
    return tuple(out), (number, action)


def _backward(env: TorchEnv, residual: Any, grads: Any) -> Any:
    number, action = residual
    obs, reward, _, _, after = grads
    shapes = (jax.ShapeDtypeStruct(action.shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.float32))
    # ``after`` comes from the gradient of the next step: so they are asked for in this order
    return jax.pure_callback(env._gradient, shapes, number, obs, reward, after, vmap_method="broadcast_all")


_step.defvjp(_forward, _backward)


def ejax_policy(policy: Any) -> Any:
    """Make ejax's policy with the networks of a torch one, which are single ``nn.Linear``."""
    networks = {name: _linear(each) for name, each in policy.named_children()}
    dense = {name: nn.Dense(each.out_features, use_bias=each.bias is not None) for name, each in networks.items()}
    return (ActorCritic if "critic" in dense else ActorOnly)(ActionSpec("normal", (policy.action_dim,)), **dense)


def ejax_params(policy: Any, *arrays: jax.Array) -> Any:
    """Arrange the arrays of ``policy.parameters()`` as ejax's parameters; a Linear's weight is a kernel, transposed."""
    params: dict[str, Any] = {}
    for (name, _), array in zip(policy.named_parameters(), arrays, strict=True):
        network, _, part = name.partition(".")
        if not part:
            params[name] = array
        else:
            kind, value = ("kernel", array.T) if part.endswith("weight") else ("bias", array)
            params.setdefault(network, {})[kind] = value
    return {"params": params}


def write_back(policy: Any, params: Any) -> None:
    """Set the torch policy's parameters to ejax's."""
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            network, _, part = name.partition(".")
            found = params["params"][network]
            value = found if not part else found["kernel"].T if part.endswith("weight") else found["bias"]
            tensor.copy_(to_torch(value))


def _linear(module: Any) -> Any:
    return next(each for each in module.modules() if isinstance(each, torch.nn.Linear))
