"""The evaluation of one policy on several engines and under shifts, and where the engines part."""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from numpy.typing import NDArray

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.envs.description import WHOLE, describe
from ejax.envs.mujoco.choice import ENGINES, Engine, how_to_install
from ejax.envs.mujoco.drawing import asset_of
from ejax.envs.mujoco.models import load_model
from ejax.envs.task.entities import name_joint
from ejax.episodes import UNLIMITED, decide
from ejax.evaluation import evaluate
from ejax.play.saved_policy import chosen_checkpoint, elsewhere, load_policy
from ejax.rollout import EnvCarry, reset, step_all, with_memory
from ejax.runtime.device import matmul_precision, prepare_jax
from ejax.runtime.tree_text import named_leaves
from ejax.store.run_dir import open_policy_run
from ejax.training.environments import build_env, with_engine
from ejax.training.watchdog import guarded_calls
from ejax.transfer.shifts import AS_IT_IS, conditions
from ejax.types import Array, Env, HostEnv, Key, Params, Policy, PyTree, Timestep

Facts: TypeAlias = dict[str, Any]
_Z = 1.959964
"""Standard deviations that 95 % of a normal distribution are within."""


def transfer_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    engines: Sequence[str] | None = None,
    shifts: Mapping[str, Sequence[float]] = {},
    num_episodes: int = 100,
    num_envs: int = 32,
    explain: bool = False,
    tolerance: float = 0.01,
    member: int | None = None,
    checkpoint: str | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> Facts:
    """Evaluate a run's policy on each engine, as it is and under each shift, from the same starts.

    Args:
        engines: the first is the reference. None: all that are installed.
        shifts: option of ``SHIFTS`` -> values.
        explain: look for the first difference even where success (without it the return) does not differ.
        tolerance: of a difference over the number's range. The others are as in ``evaluate_run``, with its errors.

    Returns:
        ``rows`` with estimates; ``differences`` of each engine from the reference, as it is and where results differ;
        what they were made with; and ``left_out``, engine that is not installed -> how to install it.

    Raises:
        ValueError: an engine that is not there; a shift that the environment cannot have.
        ConfigError: an environment without MuJoCo physics in JAX.
    """
    if not tolerance > 0.0:
        raise ValueError(f"--tolerance must be > 0, got {tolerance}")
    names = check_engines(engines)
    directory, config = open_policy_run(run, member)
    prepare_jax(device)
    config = elsewhere(config, overrides)
    trainer, configs = config.trainer, {name: with_engine(config, name) for name in names}
    seed = trainer.eval_seed if seed is None else seed
    with guarded_calls(config.env.id, trainer.collector), matmul_precision(trainer.matmul_precision, device):
        path = chosen_checkpoint(directory, checkpoint, "ejax.transfer")
        envs = {(name, AS_IT_IS): _build(each, {}) for name, each in configs.items()}
        reference = envs[names[0], AS_IT_IS]
        policy, params = load_policy(config, reference, path)
        # all are built before the first is played: what one refuses is found at once
        shifted = conditions(reference, shifts)
        for shift in list(shifted)[1:]:
            try:
                envs |= {(name, shift): _build(configs[name], shifted[shift]) for name in names}
            except ConfigError as error:  # its keys are none that the user wrote
                texts = dict.fromkeys(problem.text for problem in error.problems)
                raise ValueError(f"--{shift}: {'; '.join(texts)}") from error
        key, rows, differences = jax.random.key(seed), dict[tuple[str, str], Facts](), list[Facts]()
        for each in ((name, condition) for name in names for condition in shifted):
            print(f"{', '.join(each)} …", file=sys.stderr)
            episodes = evaluate(policy, envs[each], params, key, num_envs=num_envs, num_episodes=num_episodes)
            rows[each] = {"engine": each[0], "condition": each[1], **_estimates(jax.device_get(episodes))}
        by = "success" if "success" in rows[names[0], AS_IT_IS] else "return"
        for name, condition in ((name, condition) for name in names[1:] for condition in shifted):
            pair = (names[0], condition), (name, condition)
            beyond = differ(rows[pair[0]][by], rows[pair[1]][by])
            if condition != AS_IT_IS and not beyond:
                continue
            found = {"engine": name, "condition": condition, "reference": names[0], "of": by, "beyond": beyond}
            if explain or beyond:
                compare = partial(find_difference, policy, params, envs[pair[0]], envs[pair[1]], key)
                found["first"] = compare(num_envs=min(num_envs, num_episodes), tolerance=tolerance)
            differences.append(found)
    made = {"checkpoint": str(path), "seed": seed, "episodes": num_episodes, "tolerance": tolerance}
    all_of_them = cast(list[Engine], list(ENGINES) if engines is None else [])
    made["left_out"] = {name: how for name in all_of_them if (how := how_to_install(name))}
    return {**made, "rows": list(rows.values()), "differences": differences}


def check_engines(given: Sequence[str] | None) -> list[Engine]:
    """Name the engines to compare. ValueError: one is unknown, not installed, or given twice."""
    if given is None:
        return [name for name in cast(list[Engine], list(ENGINES)) if how_to_install(name) is None]
    names = cast(list[Engine], ["mujoco" if name == "c" else name for name in given])
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"--engines: no engine '{name}'; there is c (or mujoco), mjx, warp, with commas between")
        if how := how_to_install(name):
            raise ValueError(f"--engines: {name} is not installed: {how}; or leave it out")
    if len(set(names)) < len(names):
        raise ValueError(f"--engines: got {','.join(given)}; name each engine once")
    return names


def proportion(count: int, total: int) -> Facts:
    """Estimate a probability with Wilson's score interval, which stays within 0 … 1."""
    p, shrink = count / total, 1.0 + _Z**2 / total
    middle = (p + _Z**2 / (2 * total)) / shrink
    half = _Z / shrink * math.sqrt(p * (1.0 - p) / total + _Z**2 / (4 * total**2))
    return {"mean": p, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def average(values: NDArray[Any]) -> Facts:
    """Estimate a mean by the normal approximation: x̄ ± z·s/√n."""
    mean, half = float(values.mean()), _Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def differ(one: Facts, other: Facts) -> bool:
    """Test that the difference's 95 % interval, put together from both, leaves out 0; NaN differs from all. Source:
    Newcombe 1998, method 10, for proportions. It does not count on the starts being the same."""
    low, high = sorted((one, other), key=lambda each: each["mean"])
    return not high["mean"] - low["mean"] <= math.hypot(low["high"] - low["mean"], high["mean"] - high["low"])


def _build(config: RunConfig, events: Mapping[str, Any]) -> Any:
    """Build the evaluation's environment with more events. ConfigError: it is outside JAX."""
    if events:
        data = config.to_dict()
        data["trainer"]["events"]["eval"] = {**data["trainer"]["events"]["eval"], **events}
        config = parse_untrusted(data, ())
    env = build_env(config, phase="eval", num_envs=1)
    if isinstance(env, HostEnv):
        raise ConfigError([Problem("env.id", f"{config.env.id} is stepped outside JAX, where its engine is its own")])
    return env


def _estimates(episodes: Mapping[str, NDArray[Any]]) -> Facts:
    facts: Facts = {name: float(x.mean()) for name, x in episodes.items() if name != "unfinished"}
    facts |= {"return": average(episodes["return"]), "nonfinite": int((episodes["nonfinite"] > 0).sum())}
    if (success := episodes.get("success")) is not None:
        facts["success"] = proportion(int((success > 0).sum()), len(success))
    return facts


GROUPS = ("contact", "sensor", "observation", "reward", "state")
"""First words of terms; where several differ in one step, the first of these is named."""
_LEAST_RANGE = 0.01  # Of a number in its own unit: rounding of what hardly moves is not a difference
_TOUCH = (int(mujoco.mjtSensor.mjSENS_TOUCH), int(mujoco.mjtSensor.mjSENS_CONTACT))


def find_difference(
    policy: Policy, params: Params, reference: Env, other: Env, key: Key, *, num_envs: int, tolerance: float
) -> dict[str, Any] | None:
    """Play ``num_envs`` episodes from an evaluation's starts, each step by both; give the first difference, as
    ``compare`` does, and the pairs of bodies in contact after it: by the reference, by the other."""
    key_reset, key_steps = jax.random.split(key)
    envs = with_memory(reset(reference, key_reset, num_envs), policy)
    valid, rows = [np.ones(num_envs, bool)], list[Any]()
    while valid[-1].any() and len(rows) < (reference.max_episode_steps or UNLIMITED):
        envs, done, made = _step_both(policy, reference, other, params, envs, jax.random.fold_in(key_steps, len(rows)))
        rows.append(jax.device_get(made))
        valid.append(valid[-1] & ~np.asarray(done))
    terms = [name for path, x in rows[0][0].items() for name in _names(path, x.shape[-1], reference)]
    x, y = (np.stack([np.concatenate(list(row[i].values()), axis=-1) for row in rows]) for i in range(2))
    found = compare(terms, x, y, np.stack(valid[:-1]), tolerance)
    qpos = next((path for path in rows[0][0] if path.endswith("physics/qpos")), None)
    if found is None or qpos is None or (asset := asset_of(reference)) is None:
        return found
    places = (numbers[qpos][found["episode"]] for numbers in rows[found["step"]])
    return {**found, "touching": [_touching(load_model(asset), each) for each in places]}


def compare(
    terms: list[str], x: NDArray[Any], y: NDArray[Any], valid: NDArray[np.bool_], tolerance: float
) -> dict[str, Any] | None:
    """Find the first difference beyond ``tolerance``: by step, then by group, then by size. ``x``, of the reference,
    and ``y``: [T, N, F]; ``valid`` [T, N]: the episode goes on. What is finite by one engine alone differs infinitely.
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
        key=lambda i: (GROUPS.index(terms[i].replace("/", " ").split()[0]), -size[step, row, i]),
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
    """Give all numbers of a step, leaves [N, F] by their paths; whole ones and pictures are not among them."""
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
