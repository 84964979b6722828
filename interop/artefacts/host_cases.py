"""``interop.artefacts.cases.observe`` for environments outside JAX."""

import jax
import numpy as np

from ejax.collectors.player import act
from ejax.envs.actions import action_form, to_action
from ejax.policies.calls import first_memory, forget_outside
from ejax.types import HostEnv, Params, Policy, PyTree
from interop.artefacts.cases import as_read, leaves_of, steps_to_observe
from interop.artefacts.parity import Arrays
from interop.twin.kinds import Spec
from interop.twin.spec import MEMORY


def observe_host(policy: Policy, env: HostEnv, params: Params, spec: Spec) -> Arrays:
    """Act in the environment with sampled actions, as ``observe`` does: the observations [B, ...] by path."""
    seed = np.random.SeedSequence(0).generate_state(env.num_envs).astype(np.uint32)
    key, form = jax.random.key(0), action_form(env.action_space)
    obs = env.reset(seed)
    memory = first_memory(policy, env.num_envs)
    seen: list[PyTree] = []
    for t in range(steps_to_observe(spec, env.observation_space)):
        leaves = leaves_of(obs) | ({} if memory == () else {MEMORY: memory["actor"]})
        seen.append(jax.tree.map(np.array, leaves))  # a copy: it may write the next one over this one
        drawn, given, memory = act(policy, params, obs, memory, key, np.int32(t), {})
        timestep = env.step(to_action(form, drawn if given is None else given))
        obs = timestep.obs
        ended = timestep.terminated | timestep.truncated | ~np.asarray(timestep.info.get("valid", True))
        memory = forget_outside(policy, memory, ended)
    return as_read(spec, jax.tree.map(lambda *steps: np.concatenate(steps), *seen))
