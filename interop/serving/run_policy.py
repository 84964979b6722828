"""The policy of a run behind the server, in JAX."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ejax.envs.description import WHOLE, describe
from ejax.play.acting import load
from ejax.policies.calls import first_memory
from ejax.runtime.tree_text import named_leaves
from ejax.schema.plain_files import to_json
from interop.artefacts.contract import run_contract
from interop.serving.policies import Leaves, Served


def load_run(run: Path, *, checkpoint: str | None, member: int | None, device: str) -> Served:
    """Load a run's policy: its most probable actions, clipped where the environment clips them."""
    actor = load(run, checkpoint=checkpoint, member=member, device=device)
    example, tree = jax.tree.flatten(actor.example)
    shapes = {name or WHOLE: [x.shape[1:]] for name, x in named_leaves(actor.example).items()}
    contract = run_contract(actor.config.to_dict()["env"], actor.env, actor.form.clip is not None)
    memory, memory_tree = jax.tree.flatten(first_memory(actor.policy, 1))

    def act(leaves: Leaves, memory: Leaves) -> tuple[NDArray[Any], Leaves]:
        action, after = actor.answer(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(memory_tree, memory))
        return action, [np.asarray(x) for x in jax.tree.leaves(after)]

    return Served(
        runtime="jax",
        contract=json.loads(to_json(contract, "null")),  # plain lists and maps, which both msgpack and JSON take
        shapes=shapes,
        required=list(shapes),
        texts={name: shapes[name][0][0] for name in describe(actor.env).text},
        leaves_of=lambda parts: jax.tree.leaves(actor.rows(jax.tree.unflatten(tree, [parts[x] for x in shapes]))[0]),
        example=example,
        first_memory=[np.asarray(x) for x in memory],
        act=act,
    )
