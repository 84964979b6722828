"""From a config with ``population`` to the parts of its members' training: one program, one state."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.errors import ConcretizationTypeError

from ejax.algorithms.step import RunState, Step
from ejax.config import ConfigError, Problem, RunConfig, bind
from ejax.config.population import OPTIONS, SEPARATELY, ExploitConfig, Member
from ejax.numerics.traced_options import unjit_for_traced
from ejax.population.step import (
    Exploit,
    Placement,
    PopulationState,
    Values,
    make_population_step,
    own_keys,
    with_values,
)
from ejax.runtime.sharding import by_members, members_mesh, replicated
from ejax.schema.frozen import with_value
from ejax.training.build import all_devices, build, device_step, make_first_state, max_updates
from ejax.training.environments import evaluation_env
from ejax.training.evaluators import DeviceEvaluator, check_best_metric
from ejax.training.parts import Ingredients, Parts
from ejax.training.steppers import DeviceStepper, Layout
from ejax.training.warm_start import start_from_policy
from ejax.types import Env


@dataclass(frozen=True)
class PopulationParts:
    """The parts of a population's training. Nothing is compiled yet."""

    members: tuple[Member, ...]
    configs: tuple[RunConfig, ...]
    """Config of each member alone; bound."""
    parts: Parts
    """Those of the first member alone, environment, policy, and all else that members share; but the stepper and the
    state, a ``PopulationState``, are of all."""
    evaluator: DeviceEvaluator


def build_population(config: RunConfig) -> PopulationParts:
    """Make what trains all members of a bound config. With ``trainer.distributed`` the devices share them.

    Raises:
        ConfigError: what ``build`` refuses; environments outside the program; an option that cannot differ in it.
    """
    members = config.members
    alone = with_value(config, "trainer.distributed", False)
    configs = tuple(bind(alone.of_member(member)) for member in members)
    parts = build(configs[0])
    if not isinstance(parts.stepper, DeviceStepper):
        with parts.stepper:
            given = f"{config.env.id} with trainer.collector.mode {config.trainer.collector.mode}"
            text = f"needs an environment inside the program, got {given}; {SEPARATELY}"
            raise ConfigError([Problem("population", text)])
    check_best_metric(configs[0], parts)  # members share environment and metric
    platform = config.trainer.device.partition(":")[0]
    devices = all_devices(config) if config.trainer.distributed else []
    devices = devices[: max((n for n in range(1, len(devices) + 1) if len(members) % n == 0), default=1)]
    shared = len(devices) > 1  # as many devices as divide the members
    # a CPU is busy with one member
    placement = Placement(together=platform != "cpu", mesh=members_mesh(devices) if shared else None)

    state, notes = _first_state(members, configs, parts)
    make_step = partial(_member_step, configs[0], parts)
    _check_values(make_step, state)
    record, options = config.algorithm.record, configs[0].algorithm.cfg
    step = make_population_step(
        make_step,
        placement=placement,
        stops_at_nonfinite=record.stops_at_nonfinite(options),
        exploit=_exploit(config, configs[0]),
    )
    if shared:
        notes += (f"{len(devices)} devices, {len(members) // len(devices)} members on each",)
    trainer, mesh = config.trainer, placement.mesh
    place = layout = None
    if mesh is not None:  # the members are split over the devices
        place, everywhere = by_members(mesh), replicated(mesh)
        layout = Layout(
            lambda state: replace(jax.tree.map(lambda _: place, state), update=everywhere), place, everywhere
        )
    keys = jnp.stack([jax.random.key(member.seed) for member in members])
    env = cast(Env, evaluation_env(configs[0], parts.env))
    evaluator = DeviceEvaluator(parts.policy, env, trainer, each=placement.each, place=place)
    stepper: Any = DeviceStepper(step, keys, max_updates(trainer), layout=layout, fold=own_keys)
    shared_parts = replace(parts, stepper=stepper, state=cast(Any, state), notes=(*parts.notes, *notes))
    return PopulationParts(members, configs, shared_parts, evaluator)


def _first_state(
    members: Sequence[Member], configs: Sequence[RunConfig], parts: Parts
) -> tuple[PopulationState, tuple[str, ...]]:
    record = configs[0].algorithm.record
    states: list[RunState] = []
    notes: tuple[str, ...] = ()
    policy, env = parts.policy, cast(Env, parts.env)
    # one form of state for all: a coefficient of 0 keeps the reference too
    with_reference = any(record.keeps_reference(config.algorithm.cfg) for config in configs)
    record = replace(record, keeps_reference=lambda options: with_reference)
    values = {
        key.removeprefix(OPTIONS): jnp.asarray([member.values[key] for member in members], jnp.float32)
        for key in members[0].values
    }
    for i, config in enumerate(configs):
        state = make_first_state(Ingredients(config, record, policy, env, parts.optimizer), config.trainer.num_envs)
        if values:  # as arrays: the optimizer's state has one form for all, also where a value is 0
            own = with_values(config.algorithm.cfg, {name: value[i] for name, value in values.items()})
            opt_state = record.make_optimizer(own).init(state.train.params["params"])
            state = replace(state, train=replace(state.train, opt_state=opt_state))
        state, texts = start_from_policy(replace(parts, state=state), config)
        states.append(state)
        notes = tuple(texts)  # the same of all
    stacked = jax.jit(lambda states: jax.tree.map(lambda *x: jnp.stack(x), *states))(states)
    alive = jnp.ones(len(members), bool)
    return PopulationState(update=jnp.zeros((), jnp.int32), members=stacked, values=values, alive=alive), notes


def _member_step(config: RunConfig, parts: Parts, values: Values) -> Step:
    record, options = config.algorithm.record, config.algorithm.cfg
    if not values:
        return cast(DeviceStepper, parts.stepper).step  # nothing differs but the seed
    options = with_values(options, values)
    if record.update is not None:
        # a jitted update takes its options as constants
        record = replace(record, update=unjit_for_traced(record.update, *values.values()))
    optimizer = record.make_optimizer(options)
    return device_step(Ingredients(config, record, parts.policy, parts.env, optimizer), options)


def _check_values(make_step: Callable[[Values], Step], state: PopulationState) -> None:
    """Raise a ConfigError with the values that the algorithm cannot take as arrays."""
    one, values = jax.eval_shape(lambda state: jax.tree.map(lambda x: x[0], (state.members, state.values)), state)
    key = jax.eval_shape(jax.random.key, 0)

    def fits(values: Mapping[str, Any]) -> bool:
        try:
            jax.eval_shape(lambda state, values, key: make_step(values)(state, key), one, values, key)
        except (ConcretizationTypeError, TypeError, ValueError):
            return False
        return True

    if not values or fits(values):
        return
    # each alone first; else it is their combination
    wrong = [name for name in values if not fits({name: values[name]})] or list(values)
    text = f"decides what is computed, so that each value needs its own program; {SEPARATELY}"
    raise ConfigError([Problem(f"population.{OPTIONS}{name}", text) for name in wrong])


def _exploit(config: RunConfig, member: RunConfig) -> Exploit | None:
    given: ExploitConfig | None = config.population.exploit if config.population else None
    if given is None:
        return None
    options, record = member.algorithm.cfg, member.algorithm.record
    keys = [key.removeprefix(OPTIONS) for key in config.members[0].values]
    return Exploit(
        every=given.every,
        count=max(1, math.floor(given.fraction * len(config.members))),
        perturb=given.perturb,
        bounds={key: _bounds(type(options), key) for key in keys},
        make_optimizer=lambda values: record.make_optimizer(with_values(options, values)),
    )


def _bounds(model: Any, key: str) -> tuple[float, float]:
    """Return the range that an option's field allows; an open end counts as closed, since factors are positive."""
    *sections, name = key.split(".")
    for section in sections:
        model = model.model_fields[section].annotation
    low, high = -math.inf, math.inf
    for limit in model.model_fields[name].metadata:
        low = max(low, *(getattr(limit, each, -math.inf) for each in ("ge", "gt")))
        high = min(high, *(getattr(limit, each, math.inf) for each in ("le", "lt")))
    return low, high


take = jax.jit(lambda tree, index: jax.tree.map(lambda x: x[index], tree))
"""One member's part of what has a first axis [M]."""
