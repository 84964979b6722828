"""From a rollout to the flat batch that epochs of minibatches go over: what PPO's and GRPO's updates share."""

import jax

from ejax.types import Array, Policy, PyTree, Rollout, TrainState


def flatten(rollout: Rollout, **columns: PyTree | None) -> dict[str, PyTree]:
    """``obs``, ``action``, ``log_prob`` and ``dropout_seed`` of all T·N rows, and ``columns`` beside them.

    Args:
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
    num_rows = rollout.reward.size
    return jax.tree.map(lambda x: x.reshape(num_rows, *x.shape[2:]), present)


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
