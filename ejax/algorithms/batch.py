"""From a rollout to the flat batch that epochs of minibatches go over: what PPO's and GRPO's updates share."""

from collections.abc import Iterator

import jax

from ejax.algorithms.record import RunShape
from ejax.problems import ConfigError, Problem
from ejax.types import Array, Policy, PyTree, Rollout, TrainState


def flatten(rollout: Rollout, num_strata: int = 1, /, **columns: PyTree | None) -> dict[str, PyTree]:
    """``obs``, ``action``, ``log_prob`` and ``dropout_seed`` of all T·N rows, and ``columns`` beside them.

    Args:
        num_strata: groups of neighbouring environments; the rows of one follow on those of the one before, and within
            it on time.
        columns: leaves [T, N, ...]; those that are None are left out.

    Returns:
        Leaves [T·N, ...].
    """
    rows = {
        "obs": rollout.obs,
        "action": rollout.action,
        "log_prob": rollout.log_prob,
        "dropout_seed": rollout.dropout_seed,
        **columns,
    }
    present = {name: column for name, column in rows.items() if column is not None}
    num_steps, num_envs = rollout.reward.shape
    if num_envs % num_strata:
        raise ValueError(f"{num_envs} environments do not make {num_strata} equal strata; let minibatch_strata divide")

    def rows_of(x: Array) -> Array:
        strata = x.reshape(num_steps, num_strata, num_envs // num_strata, *x.shape[2:]).swapaxes(0, 1)
        return strata.reshape(num_steps * num_envs, *x.shape[2:])

    return jax.tree.map(rows_of, present)


def reference_log_prob(state: TrainState, rollout: Rollout, *, policy: Policy, kl_coef: float) -> Array | None:
    """log π_ref(action | obs), [T, N]; None where ``kl_coef`` is 0 and nothing reads it.

    Raises:
        ValueError: no reference to measure the divergence to.
    """
    if kl_coef == 0.0:
        return None
    if state.reference is None:
        raise ValueError(
            "kl_coef > 0 needs state.reference, the parameters to stay close to; it is None: start with "
            "init_train_state(…, reference=True)"
        )
    distribution, _ = policy.apply(state.reference, rollout.obs)
    return distribution.log_prob(rollout.action)


def share_out(batch_size: int, num_strata: int | None, was: int, now: int) -> dict[str, int]:
    """The options of minibatches for another number of devices, with the same minibatches.

    Raises:
        ConfigError: their rows cannot be shared by so many.
    """
    if (was * batch_size) % now:
        text = f"minibatches have {was} x {batch_size} rows, which {now} devices cannot share; give a divisor"
        raise ConfigError([Problem("algorithm.cfg.batch_size", text)])
    return {"batch_size": was * batch_size // now, "minibatch_strata": num_strata or was}


def strata_problems(num_strata: int | None, batch_size: int | None, run: RunShape) -> Iterator[Problem]:
    """What keeps minibatches from taking equally many rows from each stratum."""
    if num_strata is None or run.distributed:  # how many devices there are is known when the run is built
        return
    for name, count in (("trainer.num_envs", run.num_envs), ("algorithm.cfg.batch_size", batch_size)):
        if count is not None and count % num_strata:
            text = f"got {num_strata}, which does not divide {name} {count}; give a divisor of both"
            yield Problem("algorithm.cfg.minibatch_strata", text)
