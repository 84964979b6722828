"""``critic_warmup_updates``: the critic learns alone, and then all do."""

from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny import tiny

from ejax.config import ConfigError, parse_config
from ejax.run import train
from ejax.store.checkpoint import load_checkpoint
from ejax.store.run_dir import RunDirectory
from ejax.training.build import build

ADAMW = {"name": "adamw", "learning_rate": 1e-3}
"""Its weight decay moves parameters without a gradient, and lets moments out of no gradient too."""


def config_of(num_warmup: int, **ppo: Any) -> Any:
    raw = tiny(iterations=4, save_frequency_updates=1, keep_checkpoints=4, ppo={"optimizer": ADAMW, **ppo})
    raw["algorithm"]["cfg"]["critic_warmup_updates"] = num_warmup
    return parse_config(raw)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the training's states from before the first update to after the fourth, of which two warm up."""
    config = config_of(2)
    run = train(config, run_dir=tmp_path_factory.mktemp("warmup") / "run").run_dir
    start = build(config).state
    saved = reversed(RunDirectory(run, "tiny").periodic())
    return [start.train, *(load_checkpoint(path, start)[0].train for path in saved)]


def of_policy(state: Any, *, critic: bool = False) -> dict[str, bytes]:
    """Return the bits of the policy's parameters, statistics and moments, or the critic's, by name."""
    leaves = jax.tree_util.tree_flatten_with_path((state.params, state.opt_state))[0]
    named = {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in leaves}
    networks = {name: x for name, x in named.items() if "'actor" in name or "'log_std'" in name or "'critic" in name}
    return {name: x for name, x in networks.items() if ("'critic" in name) == critic}


@pytest.mark.slow
def test_the_policy_stays_bit_for_bit_while_the_critic_learns(states: list[Any]) -> None:
    assert len(states) == 5 and any("mu" in name for name in of_policy(states[0]))
    assert of_policy(states[0]) == of_policy(states[1]) == of_policy(states[2])
    critics = [of_policy(state, critic=True) for state in states]
    assert all(
        before[name] != after[name] for before, after in pairwise(critics) for name in before if "kernel" in name
    )


@pytest.mark.slow
def test_then_all_learn_and_the_optimizer_counts_anew(states: list[Any]) -> None:
    before, after = of_policy(states[2]), of_policy(states[3])
    assert all(before[name] != after[name] for name in before if "kernel" in name or "log_std" in name)
    counts = [int(optax.tree_utils.tree_get(state.opt_state, "count")) for state in states]
    assert counts == [0, 4, 8, 4, 8]  # two epochs of two minibatches


@pytest.mark.slow
def test_a_policy_without_a_critic_is_refused() -> None:
    raw = tiny(ppo={"critic_warmup_updates": 1})
    raw["policy"] = {"name": "actor_only", "actor": raw["policy"]["actor"]}
    with pytest.raises(ConfigError, match="actor_only has no critic to warm up"):
        parse_config(raw)
