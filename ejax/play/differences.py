"""The first number that differs where two engines make the same step from the same state."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.envs.description import WHOLE, describe
from ejax.envs.mujoco.drawing import asset_of
from ejax.envs.mujoco.models import load_model
from ejax.envs.task.entities import name_joint
from ejax.episodes import UNLIMITED, decide
from ejax.rollout import EnvCarry, reset, step_all, with_memory
from ejax.runtime.tree_text import named_leaves
from ejax.types import Array, Env, Key, Params, Policy, PyTree, Timestep

TERM_GROUPS = ("contact", "sensor", "observation", "reward", "state")
"""First words of terms; where several differ in one step, the first of these is named."""
_LEAST_RANGE = 0.01  # Of a number in its own unit: rounding of what hardly moves is not a difference
_TOUCH = (int(mujoco.mjtSensor.mjSENS_TOUCH), int(mujoco.mjtSensor.mjSENS_CONTACT))


def find_difference(
    policy: Policy, params: Params, reference: Env, other: Env, key: Key, *, num_envs: int, tolerance: float
) -> dict[str, Any] | None:
    """Play ``num_envs`` episodes from an evaluation's starts, each step by both: the first difference, as
    ``first_difference`` finds it, and the pairs of bodies in contact after it: by the reference, by the other."""
    key_reset, key_steps = jax.random.split(key)
    envs = with_memory(reset(reference, key_reset, num_envs), policy)
    valid, rows = [np.ones(num_envs, bool)], list[Any]()
    while valid[-1].any() and len(rows) < (reference.max_episode_steps or UNLIMITED):
        envs, done, made = _step_both(policy, reference, other, params, envs, jax.random.fold_in(key_steps, len(rows)))
        rows.append(jax.device_get(made))
        valid.append(valid[-1] & ~np.asarray(done))
    terms = [name for path, x in rows[0][0].items() for name in _names(path, x.shape[-1], reference)]
    x, y = (np.stack([np.concatenate(list(row[i].values()), axis=-1) for row in rows]) for i in range(2))
    found = first_difference(terms, x, y, np.stack(valid[:-1]), tolerance)
    qpos = next((path for path in rows[0][0] if path.endswith("physics/qpos")), None)
    if found is None or qpos is None or (asset := asset_of(reference)) is None:
        return found
    places = (numbers[qpos][found["episode"]] for numbers in rows[found["step"]])
    return {**found, "touching": [_touching(load_model(asset), each) for each in places]}


def first_difference(
    terms: list[str], x: NDArray[Any], y: NDArray[Any], valid: NDArray[np.bool_], tolerance: float
) -> dict[str, Any] | None:
    """Find the first difference beyond ``tolerance``: by step, then by group, then by size.

    Args:
        x: [T, N, F] by the reference. y: by the other; infinitely different where only one of both is finite.
        valid: [T, N], the episode continues.
    """
    both, either = np.isfinite(x) & np.isfinite(y), np.isfinite(x) | np.isfinite(y)
    seen = np.ma.array(x, mask=~(both & valid[..., None]))
    span = np.maximum((seen.max(axis=(0, 1)) - seen.min(axis=(0, 1))).filled(0.0), _LEAST_RANGE)
    with np.errstate(invalid="ignore"):
        size = np.where(both, np.abs(y - x) / span, np.where(either, np.inf, 0.0))
    beyond = (size > tolerance) & valid[..., None]
    if not beyond.any():
        return None
    step = int(beyond.any(axis=(1, 2)).argmax())
    row = int(beyond[step].sum(axis=-1).argmax())
    found = sorted(
        (int(i) for i in np.flatnonzero(beyond[step, row])),
        key=lambda i: (TERM_GROUPS.index(terms[i].replace("/", " ").split()[0]), -size[step, row, i]),
    )
    numbers = {
        name: float(each[step, row, found[0]]) for name, each in (("reference", x), ("other", y), ("size", size))
    }
    return {"term": terms[found[0]], "step": step, "episode": row, **numbers, "beside": [terms[i] for i in found[1:]]}


@partial(jax.jit, static_argnames=("policy", "reference", "other"))
def _step_both(
    policy: Policy, reference: Env, other: Env, params: Params, envs: EnvCarry, key: Key
) -> tuple[EnvCarry, Array, tuple[dict[str, Array], ...]]:
    after, made = decide(policy, reference, params, envs, key)
    theirs = step_all(other, envs.state, made.action, jax.random.split(key)[0])
    ours = _numbers(after.state, made.timestep)
    return after, made.timestep.done, (ours, _numbers(*theirs))


def _numbers(state: PyTree, timestep: Timestep) -> dict[str, Array]:
    """List all real numbers and flags of a step, leaves [N, F] by their paths, without integers and pictures."""
    ends = {"success": timestep.info["success"]} if "success" in timestep.info else {}
    reward = {"total": timestep.reward, "terminated": timestep.terminated, **ends, **timestep.info.get("rewards", {})}
    tree = {"observation": timestep.obs, "reward": reward, "state": state}
    return {
        name: x.reshape(len(x), -1).astype(jnp.float32)
        for name, x in named_leaves(tree, "/").items()
        if jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == bool
    }


def _names(path: str, width: int, env: Env) -> list[str]:
    """Name the numbers of a leaf, with units where they are known; the first word is the group."""
    group, _, part = path.partition("/")
    last, known = path.rpartition("/")[2], list[tuple[str, int]]()
    if group == "observation":
        numbers = describe(env).observation.get(part.replace("/", ".") or WHOLE, ())
        known = [(f"{path} {each.name} [{each.unit}]", 1) for each in numbers]
    elif last in ("qpos", "qvel", "readings") and (asset := asset_of(env)):
        model = load_model(asset)
        if last == "readings":
            kinds = ["contact" if kind in _TOUCH else "sensor" for kind in model.sensor_type]
            known = [(f"{kinds[i]} {model.sensor(i).name}", int(model.sensor_dim[i])) for i in range(model.nsensor)]
        else:
            joints = (name_joint(model, i)[last == "qvel"] for i in range(model.njnt))
            known = [(f"{group} {name}", size) for joint in joints for name, size in joint]
    path = path.replace("state/feet", "contact/feet")  # timers of a legged robot's
    known = known if sum(size for _, size in known) == width else [(path, width)]
    return [name if size == 1 else f"{name} {i}" for name, size in known for i in range(size)]


def _touching(model: mujoco.MjModel, qpos: NDArray[Any]) -> list[str]:
    data = mujoco.MjData(model)
    data.qpos[:] = np.nan_to_num(qpos)
    mujoco.mj_fwdPosition(model, data)  # the C engine finds the contacts of both
    bodies = ([model.body(int(model.geom_bodyid[i])).name for i in x.geom] for x in data.contact if x.dist <= 0.0)
    return sorted({"–".join(sorted(pair)) for pair in bodies})
