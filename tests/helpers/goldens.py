"""Every golden file beside what ejax computes.

``test_goldens.py`` holds the pairs close to each other; ``benchmarks/golden_differences.py`` prints how close they are.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import golden_flash_sac
import golden_point_mass
import golden_updates
import golden_vla_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
from golden_pairs import Pair, cases, load, under

from ejax.optim import OptimizerConfig, ScheduleConfig, clip_by_global_norm, make_optimizer, scheduled_learning_rate
from ejax.types import Params


def torch_optimizer(case: str) -> Iterator[Pair]:
    """Six steps."""
    golden = load("torch_optim.npz")
    name, learning_rate, kwargs = cases("torch_optim.npz")[case]
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=learning_rate, kwargs=kwargs))

    @jax.jit
    def trace(params: Params, gradients: Params) -> Params:
        def step(carry: Any, gradient: Params) -> Any:
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]

    for name, x in trace(under(golden, "initial/"), under(golden, "gradient/")).items():
        yield Pair("parameters", name, x, golden[f"{case}/{name}"], 2e-6, 2e-6)


def torch_clipping(max_norm: float) -> Iterator[Pair]:
    golden = load("torch_optim.npz")
    first = {name: g[0] for name, g in under(golden, "gradient/").items()}
    clipped, norm = jax.jit(clip_by_global_norm)(first, max_norm)
    yield Pair("norm", "norm", norm, golden[f"clip/{max_norm}/norm"], 1e-6, 0.0)
    for name, x in clipped.items():
        yield Pair("gradient", name, x, golden[f"clip/{max_norm}/{name}"], 1e-6, 0.0)


def torch_schedule(name: str) -> Iterator[Pair]:
    golden = load("torch_optim.npz")
    config = ScheduleConfig(name=name, kwargs=cases("torch_optim.npz", "schedules")[name][1])
    rates = jax.jit(lambda k: scheduled_learning_rate(0.02, config, k))(jnp.arange(9))
    expected = golden[f"schedule/{name}"]
    if name == "cosine":  # torch's swings up again; ejax's stays at its end
        expected = np.where(np.arange(9) > config.kwargs["T_max"], config.kwargs["eta_min"], expected)
    yield Pair("learning rates", name, rates, expected, 1e-5, 1e-9)


def _each(file: str, compare: Callable[[Any], Iterator[Pair]]) -> dict[tuple[str, str], Callable[[], Iterator[Pair]]]:
    return {(file, case): partial(compare, case) for case in cases(file)}


COMPARISONS: dict[tuple[str, str], Callable[[], Iterator[Pair]]] = {
    ("head_gae.npz", "GAE"): golden_updates.head_gae,
    ("head_ppo.npz", "PPO"): golden_updates.head_ppo,
    ("head_grpo_kl0.npz", "GRPO"): golden_updates.head_grpo,
    ("head_point_mass_steps.npz", "PointMassRL"): golden_point_mass.steps,
    **_each("embodichain_0_3_ppo.npz", golden_updates.options_of_0_3),
    **_each("embodichain_0_3_updates.npz", golden_updates.updates_of_0_3),
    **_each("embodichain_0_3_apg.npz", golden_point_mass.apg),
    ("flash_sac.npz", "FlashSAC"): golden_flash_sac.steps,
    ("seed_ppo.npz", "PPO"): golden_updates.seed_ppo,
    **{
        (golden_vla_models.FILE, f"{kind} {dtype}"): partial(golden_vla_models.pairs, kind, dtype)
        for kind in golden_vla_models.KINDS
        for dtype in ("float32", "float64")
    },
    **_each("torch_optim.npz", torch_optimizer),
    **{("torch_optim.npz", f"clip {norm}"): partial(torch_clipping, norm) for norm in (0.5, 100.0)},
    **{
        ("torch_optim.npz", f"schedule {name}"): partial(torch_schedule, name)
        for name in cases("torch_optim.npz", "schedules")
    },
}
"""(file, case) -> its pairs."""
