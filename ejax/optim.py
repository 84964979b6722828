"""Optimizers with torch's exact arithmetic, as optax transformations: ``optax.chain(direction, learning_rate)``. The
learning rate is in the optimizer's *state*, where it can change without a new compilation.

Source: torch.optim's documented algorithms, torch.optim.lr_scheduler's closed forms.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.core import FrozenDict
from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ejax.numerics.finite import all_finite
from ejax.numerics.platforms import by_platform
from ejax.numerics.traced_options import is_active, is_array
from ejax.schema.frozen import ANY_CASE, Kwargs, StrictModel, one_for_equal
from ejax.types import Array, Params, PyTree, TrainState, split_critic, with_networks


class _Rule(StrictModel):
    weight_decay: NonNegativeFloat = 0.0
    """Times the parameters, added to the gradient."""
    maximize: bool = False
    """Step along the gradient instead of against it."""

    def decay(self) -> list[optax.GradientTransformation]:
        return [optax.add_decayed_weights(self.weight_decay)] if is_active(self.weight_decay) else []


class _Adam(_Rule):
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the gradient's mean and of its square's, a step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def direction(self) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(*self.betas, self.eps)
        return optax.chain(*decay, adam) if (decay := self.decay()) else adam


class _AdamW(_Adam):
    weight_decay: NonNegativeFloat = 0.01
    """Times the learning rate, taken off the parameters."""

    def direction(self) -> optax.GradientTransformation:
        return optax.chain(optax.scale_by_adam(*self.betas, self.eps), optax.add_decayed_weights(self.weight_decay))


class _SGD(_Rule):
    momentum: NonNegativeFloat = 0.0
    """Decay of the velocity, a step."""
    dampening: float = 0.0
    """Share of the gradient that does not enter the velocity."""
    nesterov: bool = False
    """Nesterov's momentum."""

    def direction(self) -> optax.GradientTransformation:
        links = self.decay()
        if is_active(self.momentum):
            # torch does not dampen the first gradient, and optax.trace none
            if is_array(self.dampening) or self.dampening:
                links.append(optax.scale_by_schedule(lambda count: jnp.where(count > 0, 1.0 - self.dampening, 1.0)))
            links.append(optax.trace(self.momentum, self.nesterov))
        return optax.chain(*links) if links else optax.identity()

    @model_validator(mode="after")
    def _dampens_or_looks_ahead(self) -> "_SGD":
        if self.nesterov and self.dampening:
            raise ValueError(f"nesterov needs dampening 0, as in torch; got {self.dampening}")
        return self


class _RMSprop(_Rule):
    alpha: float = Field(default=0.99, ge=0.0, lt=1.0)
    """Decay of the squared gradient's mean, a step."""
    eps: PositiveFloat = 1e-8
    """Added to its root."""
    momentum: NonNegativeFloat = 0.0
    """Decay of the velocity, a step."""
    centered: bool = False
    """Divide by the deviation instead of the root mean square."""

    def direction(self) -> optax.GradientTransformation:
        scale = optax.scale_by_stddev if self.centered else optax.scale_by_rms
        velocity = [optax.trace(self.momentum)] if is_active(self.momentum) else []
        return optax.chain(*self.decay(), scale(decay=self.alpha, eps=self.eps, eps_in_sqrt=False), *velocity)


OPTIMIZER_KWARGS: dict[str, type[Any]] = {"adam": _Adam, "adamw": _AdamW, "sgd": _SGD, "rmsprop": _RMSprop}


class OptimizerConfig(StrictModel):
    """``algorithm.cfg.optimizer``. ``kwargs`` are torch's, by name and default; ``OPTIMIZER_KWARGS`` lists them."""

    name: Annotated[Literal["adam", "adamw", "sgd", "rmsprop"], ANY_CASE] = "adam"
    """The update rule, torch's arithmetic."""
    learning_rate: NonNegativeFloat = 3e-4
    """The learning rate at the start; it is part of the optimizer's state, and schedules change it there."""
    kwargs: Kwargs = Field(default_factory=FrozenDict)
    """torch's arguments. adam, adamw: ``betas``, ``eps``, ``weight_decay``, ``maximize``. sgd: ``momentum``,
    ``dampening``, ``weight_decay``, ``nesterov``, ``maximize``. rmsprop: ``alpha``, ``eps``, ``weight_decay``,
    ``momentum``, ``centered``, ``maximize``."""
    ema_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Decay of an average of the weights, which acts outside rollouts: ``ejax.numerics.weight_average``. None: none."""

    @field_validator("kwargs")
    @classmethod
    def _known(cls, kwargs: Any, info: ValidationInfo) -> Any:
        if "lr" in dict(kwargs):
            raise ValueError("lr is not one of them; the learning rate is optimizer.learning_rate")
        if "name" in info.data:
            OPTIMIZER_KWARGS[info.data["name"]].model_validate(dict(kwargs), strict=True)
        return kwargs


# Closed forms of float32: optax's schedules clip and divide in another order, and so round otherwise.


class _Linear(StrictModel):
    start_factor: PositiveFloat = 1.0
    """Factor of the learning rate at the start."""
    end_factor: NonNegativeFloat = 0.0
    """EmbodiChain's default; torch's own is 1."""
    total_iters: PositiveInt | None = None
    """Updates until ``end_factor`` is reached, which stays. None: those that the run begins with."""

    def rate(self, start: float, k: Array) -> Array:
        assert self.total_iters is not None, "bind_schedule has set it"
        fraction = jnp.minimum(k / self.total_iters, 1.0)
        return start * (self.start_factor + (self.end_factor - self.start_factor) * fraction)


class _Cosine(StrictModel):
    T_max: PositiveInt | None = None
    """Updates until ``eta_min`` is reached, which stays. None: those that the run begins with."""
    eta_min: NonNegativeFloat = 0.0
    """The lowest learning rate."""

    def rate(self, start: float, k: Array) -> Array:
        assert self.T_max is not None, "bind_schedule has set it"
        k = jnp.minimum(k, self.T_max)  # torch's swings up again
        return self.eta_min + (start - self.eta_min) * 0.5 * (1.0 + jnp.cos(jnp.pi * k / self.T_max))


class _Step(StrictModel):
    step_size: PositiveInt
    """Updates between two drops."""
    gamma: PositiveFloat = 0.1
    """Factor of a drop."""

    def rate(self, start: float, k: Array) -> Array:
        return start * self.gamma ** jnp.floor(k / self.step_size)


class _Exponential(StrictModel):
    gamma: PositiveFloat
    """Factor of every update."""

    def rate(self, start: float, k: Array) -> Array:
        return start * self.gamma**k


SCHEDULE_KWARGS: dict[str, type[Any]] = {
    "linear": _Linear,
    "cosine": _Cosine,
    "step": _Step,
    "exponential": _Exponential,
}
_HORIZON = {"linear": "total_iters", "cosine": "T_max"}  # the keyword for the updates of the run
STRETCHABLE = tuple(f"lr_scheduler.kwargs.{name}" for name in _HORIZON.values())
"""Keys of ``algorithm.cfg`` that a resumed run may change: a longer run, a longer schedule."""


class ScheduleConfig(StrictModel):
    """``algorithm.cfg.lr_scheduler``: one step per update. ``SCHEDULE_KWARGS`` lists the keywords of each name."""

    name: Annotated[Literal["linear", "cosine", "step", "exponential"] | None, ANY_CASE] = None
    """torch.optim.lr_scheduler's of this name, one step an update. None: the learning rate stays."""
    kwargs: Kwargs = Field(default_factory=FrozenDict, validate_default=True)
    """torch's arguments. linear: ``start_factor``, ``end_factor``, ``total_iters``. cosine: ``T_max``, ``eta_min``.
    step: ``step_size``, ``gamma``. exponential: ``gamma``."""

    @field_validator("kwargs")
    @classmethod
    def _known(cls, kwargs: Any, info: ValidationInfo) -> Any:
        name = info.data.get("name")
        if name is None and kwargs and "name" in info.data:
            raise ValueError(f"given without a name; name one of {', '.join(SCHEDULE_KWARGS)}")
        if name is not None:
            SCHEDULE_KWARGS[name].model_validate(dict(kwargs), strict=True)
        return kwargs


class Elementwise(optax.GradientTransformation):
    """An optimizer that treats each number separately: it may be given all of them in one vector."""


class LearningRate(NamedTuple):
    """State of the last link of every ejax optimizer."""

    learning_rate: Array


@one_for_equal
def make_optimizer(config: OptimizerConfig) -> Elementwise:
    """Make the optimizer, without gradient clipping; equal configs give the same one."""
    kwargs = _keywords(OPTIMIZER_KWARGS[config.name], config.kwargs)
    ascent = [optax.scale(-1.0)] if kwargs.maximize else []
    links = [*ascent, kwargs.direction(), scale_by_learning_rate(config.learning_rate)]
    if config.ema_decay is not None:
        from ejax.numerics.weight_average import average_weights  # few runs have one

        links.append(average_weights(config.ema_decay))
    return Elementwise(*optax.chain(*links))


@one_for_equal
def make_actor_critic_optimizer(actor: OptimizerConfig, critic: OptimizerConfig) -> optax.GradientTransformation:
    """Join two optimizers that are stepped apart: one of the network ``critic``, one of all the others. The state is
    ``{"actor": …, "critic": …}``; ``update`` takes the gradients of either or both, and leaves the other's state."""
    if critic.ema_decay is not None:
        raise ValueError("critic_optimizer has ema_decay, but only what acts is averaged; give it to optimizer")
    # optax.partition steps all parts at once: the critic's epochs would move the actor's moments
    optimizers = {"actor": make_optimizer(actor), "critic": make_optimizer(critic)}

    def shares(networks: PyTree) -> dict[str, PyTree]:
        return dict(zip(("actor", "critic"), split_critic(networks), strict=True))

    def init(params: PyTree) -> PyTree:
        return {name: optimizers[name].init(share) for name, share in shares(params).items()}

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        parameters = {} if params is None else shares(params)
        directions: dict[str, PyTree] = {}
        after = dict(state)
        for name, share in shares(updates).items():
            if share:
                direction, after[name] = optimizers[name].update(share, state[name], parameters.get(name))
                directions |= direction
        return directions, after

    return optax.GradientTransformation(init, update)


def scale_by_learning_rate(learning_rate: float) -> optax.GradientTransformation:
    """Multiply by −learning_rate, where the learning rate is read from the state."""

    # optax.inject_hyperparams would keep a count, and the state of a transformation inside, besides the one number
    def init(params: PyTree) -> LearningRate:
        del params
        return LearningRate(jnp.asarray(learning_rate, jnp.float32))

    def update(updates: PyTree, state: LearningRate, params: PyTree = None) -> tuple[PyTree, LearningRate]:
        del params
        return jax.tree.map(lambda u: -state.learning_rate.astype(u.dtype) * u, updates), state

    return optax.GradientTransformation(init, update)


def get_learning_rate(opt_state: PyTree) -> Array:
    """Read the learning rate from the state of an optimizer with one leaf named ``learning_rate``; else NaN."""
    rate = optax.tree_utils.tree_get(opt_state, "learning_rate", default=None)
    return jnp.asarray(jnp.nan, jnp.float32) if rate is None else rate


def set_learning_rate(opt_state: PyTree, learning_rate: Array) -> PyTree:
    """Set the learning rate in the state. Raises KeyError: the optimizer keeps none there; see ``make_optimizer``."""
    return optax.tree_utils.tree_set(opt_state, learning_rate=learning_rate)


def bind_schedule(config: ScheduleConfig, total_updates: int) -> ScheduleConfig:
    """Set the horizon that linear and cosine leave open: the updates of the run (> 0: ValueError)."""
    if total_updates <= 0:
        raise ValueError(f"a schedule needs total_updates > 0, got {total_updates}")
    horizon = _HORIZON.get(config.name or "")
    if horizon is None or dict(config.kwargs).get(horizon) is not None:
        return config
    return ScheduleConfig(name=config.name, kwargs=FrozenDict({**config.kwargs, horizon: total_updates}))


def scheduled_learning_rate(learning_rate: float, schedule: ScheduleConfig, num_updates: Array) -> Array:
    """Compute the learning rate after ``num_updates`` finished updates. Float32 scalar. Raises ValueError: a linear or
    cosine schedule without its horizon; see ``bind_schedule``."""
    k = jnp.asarray(num_updates, jnp.float32)
    if schedule.name is None:
        return jnp.full_like(k, learning_rate)
    if schedule.name in _HORIZON and dict(schedule.kwargs).get(_HORIZON[schedule.name]) is None:
        raise ValueError(f"lr_scheduler '{schedule.name}' has no horizon; bind_schedule gives it the run's updates")
    rate: Array = _keywords(SCHEDULE_KWARGS[schedule.name], schedule.kwargs).rate(learning_rate, k)
    return rate


def schedule_note(options: Any, begun: int, total: int) -> str:
    """Say which updates of a run, from ``begun`` to ``total``, come after the end of its schedule; empty if none do, or
    if a new run was made so and its last rate is above 0."""
    schedule: Any = getattr(options, "lr_scheduler", ScheduleConfig())
    key = _HORIZON.get(schedule.name or "", "")
    end = dict(schedule.kwargs).get(key, total)
    late = total - max(begun, end)
    if late <= 0:
        return ""
    rate = float(scheduled_learning_rate(options.optimizer.learning_rate, schedule, end))
    if rate > 0.0 and not begun:
        return ""
    what = f"have the rate {rate:.4g}" if rate > 0.0 else "have the rate 0, and learn nothing"
    text = f"the schedule of the learning rate, {schedule.name}, ends with update {end}: {late} updates"
    return f"{text} from there to {total} {what}; algorithm.cfg.lr_scheduler.kwargs.{key}={total} stretches it"


def step_schedule(state: TrainState, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> TrainState:
    """Count one update, and set the learning rate of the next by a schedule with its horizon (``bind_schedule``)."""
    step = state.step + 1  # of updates, not of gradient steps: schedules count these
    if schedule.name is None:
        return replace(state, step=step)
    rate = scheduled_learning_rate(optimizer.learning_rate, schedule, step)
    return replace(state, step=step, opt_state=set_learning_rate(state.opt_state, rate))


def step_schedules(
    state: TrainState, optimizers: Mapping[str, OptimizerConfig], schedule: ScheduleConfig
) -> TrainState:
    """Do ``step_schedule`` for each of the optimizers of ``make_actor_critic_optimizer``, from its own rate."""
    stepped = {
        name: step_schedule(replace(state, opt_state=state.opt_state[name]), optimizer, schedule)
        for name, optimizer in optimizers.items()
    }
    return replace(stepped["actor"], opt_state={name: each.opt_state for name, each in stepped.items()})


def follow_critic(target: Params, params: Params, rate: float) -> Params:
    """Take the new parameters, but the critic's only ``rate`` of the way from those of ``target``."""
    _, new = split_critic(params["params"])  # its memory and its normalizer too
    _, old = split_critic(target["params"])
    return with_networks(params, optax.incremental_update(new, old, rate))


def apply_gradient(
    state: TrainState,
    grads: PyTree,
    *,
    optimizer: optax.GradientTransformation,
    finite: Array,
    skip: bool,
    learning_rate: Array | None = None,
) -> tuple[TrainState, Array]:
    """Make one step of the optimizer (``step`` is left to the caller), or none where it would not be finite: a finite
    gradient is not enough.

    Args:
        grads: of ``state.params["params"]``.
        finite: the loss and the gradient are.
        skip: False: take the step even where something is not finite.
        learning_rate: of this step and those after it. None: that of the state.

    Returns:
        The state, and a bool: ``finite``, and so are the parameters and the optimizer's state after the step.
    """
    opt_state = state.opt_state if learning_rate is None else set_learning_rate(state.opt_state, learning_rate)
    updates, opt_state = optimizer.update(grads, opt_state, state.params["params"])
    params = optax.apply_updates(state.params["params"], updates)
    after = replace(state, params={**state.params, "params": params}, opt_state=opt_state)
    # optax.apply_if_finite looks at gradients alone, and counts in the state
    # behind a barrier: the compiler would merge this with the step, and round that otherwise
    finite &= all_finite(jax.lax.optimization_barrier((after.params["params"], after.opt_state)))
    if skip:
        # a CPU copies nothing where it takes a branch; a GPU would wait for the host to read the condition
        after = by_platform(
            cpu=lambda finite, after, before: jax.lax.cond(finite, lambda: after, lambda: before),
            gpu=lambda finite, *states: jax.tree.map(partial(jnp.where, finite), *states),
        )(finite, after, state)
    return after, finite


def clip_by_global_norm(grads: PyTree, max_norm: float) -> tuple[PyTree, Array]:
    """Clip by g · min(1, max_norm / (‖g‖₂ + 1e-6)), as torch's ``clip_grad_norm_``, over all leaves together. Returns
    the clipped gradients and the norm before clipping."""
    # optax's divides by the norm alone, and only above the limit: other bits than torch's
    norm = optax.tree.norm(grads)
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return jax.tree.map(lambda g: g * factor, grads), norm


def _keywords(model: type[Any], given: Any) -> Any:
    given = dict(given)
    # arrays, of a population's members, are not numbers to pydantic, which saw the config's before
    return model.model_construct(**given) if any(map(is_array, given.values())) else model(**given)
