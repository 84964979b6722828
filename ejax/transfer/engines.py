"""The evaluation of one policy on several engines and under shifts, and where the engines part."""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
from numpy.typing import NDArray

from ejax.config import ConfigError, Problem, RunConfig
from ejax.config.load import parse_untrusted
from ejax.envs.mujoco.choice import ENGINES, Engine, how_to_install
from ejax.evaluation import evaluate
from ejax.play.saved_policy import chosen_checkpoint, elsewhere, load_policy
from ejax.runtime.device import matmul_precision, prepare_jax
from ejax.store.run_dir import open_policy_run
from ejax.training.environments import build_env, with_engine
from ejax.training.watchdog import guarded_calls
from ejax.transfer.differences import find_difference
from ejax.transfer.shifts import AS_IT_IS, conditions
from ejax.types import HostEnv

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
    facts: Facts = {name: float(x.mean()) for name, x in episodes.items()}
    facts |= {"return": average(episodes["return"]), "nonfinite": int((episodes["nonfinite"] > 0).sum())}
    if (success := episodes.get("success")) is not None:
        facts["success"] = proportion(int((success > 0).sum()), len(success))
    return facts
