"""The evaluation of one policy on several engines and under shifts: a table, and sentences below it on the first number
that differs where two engines make the same step from the same state."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import gymnasium
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
from ejax.envs.task.entities import ROBOT, drives_of_joints, free_bodies, name_joint, robot_links
from ejax.episodes import UNLIMITED, decide
from ejax.evaluation import count_episodes, evaluate, summarize
from ejax.play.saved_policy import opened_policy, restore_policy
from ejax.rollout import EnvCarry, reset, step_all, with_memory
from ejax.runtime.tree_text import named_leaves
from ejax.training.environments import build_env, with_engine
from ejax.types import Array, Env, HostEnv, Key, Params, Policy, PyTree, Timestep

Facts: TypeAlias = dict[str, Any]
AS_IT_IS, TOGETHER = "as it is", "all of these"
_ENGINES = cast(list[Engine], list(ENGINES))
_Z = 1.959964
"""Standard deviations that 95 % of a normal distribution are within."""
_HEAD = ["engine", "condition", "success", "from", "to", "return", "from", "to"]
TERM_GROUPS = ("contact", "sensor", "observation", "reward", "state")
"""First words of terms; where several differ in one step, the first of these is named."""
_LEAST_RANGE = 0.01  # Of a number in its own unit: rounding of what hardly moves is not a difference
_TOUCH = (int(mujoco.mjtSensor.mjSENS_TOUCH), int(mujoco.mjtSensor.mjSENS_CONTACT))


def compare_run(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    engines: Sequence[str] = ("all",),
    shifts: Mapping[str, Sequence[float]] = {},
    num_episodes: int = 100,
    num_envs: int = 32,
    explain: bool = False,
    tolerance: float = 0.01,
    seed: int | None = None,
    **opened: Any,
) -> Facts:
    """Evaluate a run's policy on each engine, as it is and under each shift, from the same starts.

    Args:
        engines: the first is the reference; ``all`` that are installed.
        shifts: kind of ``conditions`` -> values.
        explain: look for the first difference even where success (without it the return) does not differ.
        tolerance: of a difference over the number's range. The others are as in ``evaluate_run``, with its errors.

    Returns:
        ``rows`` with estimates; ``differences`` of each engine from the reference, as it is and where results differ;
        what they were made with; and ``left_out``, engine that is not installed -> how to install it.

    ValueError: an engine that is not there; a shift that the environment cannot have. ConfigError: an environment
    without MuJoCo physics in JAX.
    """
    if not tolerance > 0.0:
        raise ValueError(f"--tolerance must be > 0, got {tolerance}")
    if num_episodes < 2:
        raise ValueError(f"--episodes must be at least 2 for an interval, got {num_episodes}")
    names = check_engines(engines)
    with opened_policy(run, overrides, **opened) as (_, config, path):
        seed = config.trainer.eval_seed if seed is None else seed
        reference = _build(config, names[0], AS_IT_IS, {})
        shifted = conditions(reference, shifts)
        # all are built before the first is played: what one refuses is found at once
        envs = {(name, shift): _build(config, name, shift, shifted[shift]) for name in names for shift in shifted}
        policy, params = restore_policy(config, reference, path)
        key, rows, differences = jax.random.key(seed), dict[tuple[Engine, str], Facts](), list[Facts]()
        for each, env in envs.items():
            print(f"{', '.join(each)} …", file=sys.stderr)
            episodes = evaluate(policy, env, params, key, num_envs=num_envs, num_episodes=num_episodes)
            rows[each] = {"engine": each[0], "condition": each[1], **estimates(jax.device_get(episodes))}
        by = "success" if "success" in rows[names[0], AS_IT_IS] else "return"
        for (name, shift), row in rows.items():
            beyond = differ(rows[names[0], shift][by], row[by])
            if name == names[0] or (shift != AS_IT_IS and not beyond):
                continue
            found = {"engine": name, "condition": shift, "reference": names[0], "of": by, "beyond": beyond}
            if explain or beyond:
                pair, size = (envs[names[0], shift], envs[name, shift]), min(num_envs, num_episodes)
                found["first"] = find_difference(policy, params, *pair, key, num_envs=size, tolerance=tolerance)
            differences.append(found)
    missing = {name: how_to_install(name) for name in _ENGINES if list(engines) == ["all"] and name not in names}
    made = {"checkpoint": str(path), "seed": seed, "episodes": num_episodes, "tolerance": tolerance}
    return {**made, "left_out": missing, "rows": list(rows.values()), "differences": differences}


def check_engines(given: Sequence[str]) -> list[Engine]:
    """Name the engines to compare. ValueError: one is unknown, not installed, or given twice."""
    if list(given) == ["all"]:
        return [name for name in _ENGINES if how_to_install(name) is None]
    names = cast(list[Engine], ["mujoco" if name == "c" else name for name in given])
    for name in names:
        if name not in _ENGINES:
            there = "there is c (or mujoco), mjx, warp, with commas between; or all"
            raise ValueError(f"--engine: no engine '{name}'; {there}")
        if how := how_to_install(name):
            raise ValueError(f"--engine: {name} is not installed: {how}; or leave it out")
    if len(set(names)) < len(names):
        raise ValueError(f"--engine: got {','.join(given)}; name each engine once")
    return names


def conditions(env: Any, shifts: Mapping[str, Sequence[float]]) -> dict[str, Facts]:
    """Name -> events of ``trainer.events`` whose ranges are one value: none, as the environment is; each shift; and all
    together where none has two values. ValueError: the environment has nothing to shift so."""
    made: dict[str, Facts] = {AS_IT_IS: {}}
    for name, values in shifts.items():
        for value in values:
            made[f"{name} {value:g}"] = {
                f"transfer_{name}_{i}": {"func": func, "mode": "reset", "params": params}
                for i, (func, params) in enumerate(_events(env, name, value))
            }
    if len(made) > 2 and all(len(values) <= 1 for values in shifts.values()):
        made[TOGETHER] = {name: event for events in made.values() for name, event in events.items()}
    return made


def _events(env: Any, name: str, value: float) -> Iterator[tuple[str, Facts]]:
    """Yield the functions of a shift and their parameters, on everything that it is about."""
    ends, robot, space = [value, value], {"uid": ROBOT}, env.observation_space
    if name == "latency":
        yield "delay_action", {"steps_range": ends}
    elif name == "noise" and isinstance(space, gymnasium.spaces.Dict):
        if nested := [part for part, x in space.items() if isinstance(x, gymnasium.spaces.Dict)]:
            raise ValueError(f"--noise: the observation's part {nested[0]} is nested; leave out --noise")
        for part, x in space.items():
            if np.issubdtype(x.dtype or object, np.floating):
                yield "add_observation_noise", {"noise": value, "part": part}
    elif name == "noise":
        yield "add_observation_noise", {"noise": value}
    elif (asset := asset_of(env)) is None:
        raise ValueError(f"--{name}: {type(env).__name__} has no MuJoCo model whose physics could be shifted")
    elif name == "drives":
        yield "randomize_drive_gains", {"entity_cfg": robot, "stiffness_range": ends, "damping_range": ends}
    else:
        model, scaled = load_model(asset), {f"{name}_range": ends, "operation": "scale"}
        links = robot_links(model, robot) if drives_of_joints(model) else []
        objects = [{"uid": uid} for uid, body in free_bodies(model).items() if body not in links]
        yield from ((f"randomize_rigid_object_{name}", {"entity_cfg": each, **scaled}) for each in objects)
        if name == "mass" and links:
            yield "randomize_articulation_mass", {"entity_cfg": robot, **scaled}
        if name == "friction" and not objects:  # else what touches an object would be written twice
            yield "randomize_rigid_object_friction", {"entity_cfg": robot, **scaled}


def _build(config: RunConfig, engine: Engine, shift: str, events: Facts) -> Any:
    """Build the evaluation's environment on an engine, with more events. ConfigError: it is outside JAX."""
    data = with_engine(config, engine).to_dict()
    data["trainer"]["events"]["eval"] = {**data["trainer"]["events"]["eval"], **events}
    try:
        env = build_env(parse_untrusted(data, ()), phase="eval", num_envs=1)
    except ConfigError as error:
        if not events:
            raise
        texts = dict.fromkeys(problem.text for problem in error.problems)  # the user wrote none of its keys
        raise ValueError(f"--{shift}: {'; '.join(texts)}") from error
    if isinstance(env, HostEnv):
        raise ConfigError([Problem("env.id", f"{config.env.id} is stepped by an engine that ejax cannot choose")])
    return env


def estimates(episodes: Mapping[str, NDArray[Any]]) -> Facts:
    """Average an evaluation's episodes, with intervals of success and return."""
    facts: Facts = {name: float(x.mean()) for name, x in episodes.items() if name not in ("unfinished", "same_start")}
    facts |= {"return": average(episodes["return"]), "nonfinite": int((episodes["nonfinite"] > 0).sum())}
    facts["episodes"] = count = count_episodes(summarize(episodes), len(episodes["return"]))
    if (success := episodes.get("success")) is not None:
        facts["success"] = proportion(int((success[:count] > 0).sum()), count)
    return facts


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


def as_markdown(result: Facts) -> str:
    """Format the result of ``compare_run`` as a table, its columns aligned, and sentences; or that of another function
    with ``head`` in place of engines, and ``columns`` more."""
    columns = {name: tag for name, tag in result.get("columns", {}).items() if tag in result["rows"][0]}
    head = [result.get("head", _HEAD[0]), *_HEAD[1:], *columns]
    rows = [
        [row["engine"], row["condition"], *_cells(row.get("success"), 3), *_cells(row["return"], 2)]
        + [f"{row[tag]:.3g}" for tag in columns.values()]
        for row in result["rows"]
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in (head, ["-" * width for width in widths], *rows)
    ]
    what = f"{result['episodes']} episodes a row, intervals of 95 %"
    lines += ["", f"{what}; seed {result['seed']}, {result['checkpoint']}"]
    lines += [f"{name} is left out: not installed ({how})" for name, how in result["left_out"].items()]
    for row in result["rows"]:
        if row["nonfinite"]:
            lines.append(f"{row['engine']}, {row['condition']}: {row['nonfinite']} episodes with numbers not finite")
        if row["episodes"] < result["episodes"]:
            lines.append(f"{row['engine']}, {row['condition']}: all episodes began and went alike, and count as one")
    return "\n".join([*lines, *(_sentence(each, result["tolerance"]) for each in result["differences"])])


def _cells(estimate: Mapping[str, float] | None, digits: int) -> list[str]:
    return ["–"] * 3 if estimate is None else [f"{x:.{digits}f}" for x in estimate.values()]


def _sentence(found: Facts, tolerance: float) -> str:
    verdict = f"{found['of']} {'differs' if found['beyond'] else 'does not differ'} from {found['reference']}'s"
    text = f"{found['engine']}, {found['condition']}: {verdict} beyond the intervals. "
    if "first" not in found:
        return f"{text}--explain compares them step by step."
    if (first := found["first"]) is None:
        return f"{text}From equal states no number differs by {tolerance:g} of its range."
    numbers = f"{first['reference']:.5g} and {first['other']:.5g}, {first['size']:.2g} of its range"
    text += f"From equal states, {first['term']} is the first to differ by {tolerance:g}: {numbers}, in step "
    more = f"; next to it {', '.join(first['beside'][:4])}" if first["beside"] else ""
    ours, theirs = (", ".join(pairs) or "nothing" for pairs in first.get("touching", ([], [])))
    more += f"; in contact after it {ours}" + ("" if ours == theirs else f", by {found['engine']} {theirs}")
    return f"{text}{first['step']} of episode {first['episode']}{more}."
