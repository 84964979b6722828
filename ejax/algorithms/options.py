"""Options that algorithms share: of every gradient step, and of minibatches over a rollout.

``options.toml`` has other spellings of options, accepted in config files and in arguments of these classes.
"""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, model_validator

from ejax.algorithms.record import RunShape
from ejax.algorithms.sgd import MinibatchConfig
from ejax.optim import OptimizerConfig, ScheduleConfig
from ejax.runtime.sharding import num_shards
from ejax.schema.frozen import StrictModel, given_fields
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.tables import tables_beside
from ejax.types import Policy, PolicyWithMemory

_TABLES = tables_beside(__file__)
MOVED: dict[str, str] = _TABLES["moved"]
"""Option of EmbodiChain -> its place here, ``section.name``."""
WITHOUT_EFFECT: dict[str, str] = _TABLES["without_effect"]
COMPAT: dict[str, dict[str, dict[str, Any]]] = _TABLES["compat"]
"""Algorithm -> ``Algorithm.compat``: the options that give a release's numbers."""


class GradientOptions(StrictModel):
    """The optimizer, its schedule, and the limits of a gradient step: what the options of all algorithms have.

    ``learning_rate=3e-4`` means ``optimizer=OptimizerConfig(learning_rate=3e-4)``, here and in ``replace``.
    """

    ignored: ClassVar[tuple[str, ...]] = ()  # EmbodiChain accepts them for each algorithm; they do nothing in this one

    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule and the learning rate."""
    lr_scheduler: ScheduleConfig = ScheduleConfig()
    """The change of the learning rate from update to update."""
    max_grad_norm: PositiveFloat = Field(default=0.5, allow_inf_nan=True)
    """Infinity: no clipping."""
    skip_nonfinite_updates: bool = True
    """Leave parameters and optimizer as they are when a minibatch's loss or gradient, or the step that the optimizer
    makes of it, is NaN or infinite, and count it; False: training stops with NonFiniteUpdateError."""

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if "device" in given:  # EmbodiChain's files have it, where a notice is enough; an argument would be a wish
            raise ValueError("device belongs to the run; pass Trainer(..., device=...) instead")
        without_effect = WITHOUT_EFFECT | dict.fromkeys(cls.ignored, f"no effect on {cls.__name__}; leave it out")
        for name in [name for name in given if name in without_effect]:
            warnings.warn(f"{name}: {without_effect[name]}", stacklevel=3)
        given = {name: value for name, value in given.items() if name not in without_effect}
        for old, new in MOVED.items():
            section, name = new.split(".")
            fields = given.get(section) or {}
            fields = given_fields(fields) if isinstance(fields, BaseModel) else fields
            if old not in given or not isinstance(fields, dict):  # the latter is refused by its own field
                continue
            if name in fields:
                raise ValueError(f"{old} means the same as {new}, which is given too; keep one")
            given[section] = {**fields, name: given.pop(old)}
        return given

    if TYPE_CHECKING:
        learning_rate: float = 3e-4  # an argument too
    else:

        @property
        def learning_rate(self) -> float:
            """The optimizer's, at the start."""
            return self.optimizer.learning_rate

    def replace(self, **changes: Any) -> Self:
        if "learning_rate" in changes and "optimizer" not in changes:
            changes["optimizer"] = self.optimizer.replace(learning_rate=changes.pop("learning_rate"))
        return super().replace(**changes)

    def minibatches_of(self, batch_size: int, n_epochs: int, num_strata: int = 1) -> MinibatchConfig:
        return MinibatchConfig(
            n_epochs=n_epochs,
            batch_size=batch_size,
            max_grad_norm=self.max_grad_norm,
            skip_nonfinite=self.skip_nonfinite_updates,
            num_strata=num_strata,
        )


class MinibatchOptions(GradientOptions):
    """Epochs of minibatches over a rollout."""

    n_epochs: PositiveInt = 10
    """Passes over a rollout in one update."""
    batch_size: PositiveInt = 64
    """Rows of one minibatch on each device; the last one of an epoch may be smaller."""
    minibatch_strata: PositiveInt | None = None
    """ejax: minibatches take equally many rows from each of this many groups of neighbouring environments. None: from
    each device, which then needs none of the others' rows; D devices compute what one does with D strata."""
    sequence_length: PositiveInt | None = None
    """ejax: of a policy with memory, successive steps that stay together in a minibatch, and that gradients go back
    over; divides ``buffer_size`` and ``batch_size``. None: the longest that does, up to 128."""

    @property
    def minibatch_steps(self) -> int | None:
        """Steps of a minibatch on one device. None: the rollout decides."""
        return self.batch_size

    def minibatches(self, num_steps: int, num_strata: int, length: int) -> MinibatchConfig:
        """Make the use of a batch of ``num_steps``, T·N, in rows of ``length`` steps."""
        del num_steps
        return self.minibatches_of(num_shards() * self.batch_size // length, self.n_epochs, num_strata)

    def rescale_for_devices(self, was: int, now: int) -> Self:
        """Return options with the same minibatches on another number of devices. ConfigError: they cannot share the
        rows."""
        return self.model_copy(update=shared_minibatches(self, was, now))

    def problems(self, run: RunShape) -> Iterator[Problem]:
        """Report minibatches that a rollout cannot be cut into."""
        steps = self.minibatch_steps
        if steps is not None and steps > run.rows:
            yield run.too_many("batch_size", steps)
        length = self.sequence_length
        yield from indivisible("sequence_length", length, run.buffer_size, "trainer.buffer_size")
        yield from indivisible("sequence_length", length, steps, "algorithm.cfg.batch_size")
        if not run.distributed:  # how many devices there are is known when the run is built
            rows = None if steps is None else steps // (length or 1)
            yield from indivisible("minibatch_strata", self.minibatch_strata, run.num_envs, "trainer.num_envs")
            yield from indivisible("minibatch_strata", self.minibatch_strata, rows, "algorithm.cfg.batch_size")


def shared_minibatches(options: Any, was: int, now: int) -> dict[str, int]:
    """Compute ``batch_size`` and ``minibatch_strata`` that give ``now`` devices the minibatches of ``was``."""
    rows = was * options.batch_size
    if rows % now:
        text = f"minibatches have {was} x {options.batch_size} rows, which {now} devices cannot share; use a divisor"
        raise ConfigError([Problem("algorithm.cfg.batch_size", text)])
    return {"batch_size": rows // now, "minibatch_strata": options.minibatch_strata or was}


def indivisible(option: str, divisor: int | None, count: int | None, name: str) -> Iterator[Problem]:
    if divisor is not None and count is not None and count % divisor:
        text = f"got {divisor}, which does not divide {name} {count}; use a divisor of both"
        yield Problem(f"algorithm.cfg.{option}", text)


def _memory_problems(options: Any, policy: Policy) -> Iterator[Problem]:
    """Report a ``sequence_length`` for a policy without memory."""
    if options.sequence_length is not None and not isinstance(policy, PolicyWithMemory):
        text = f"got {options.sequence_length}, but the policy has no memory; leave it out, or add policy.actor.memory"
        yield Problem("algorithm.cfg.sequence_length", text)


MINIBATCH_FIELDS: dict[str, Any] = {
    "rescale_for_devices": lambda options, was, now: options.rescale_for_devices(was, now),
    "policy_problems": _memory_problems,
}
"""Fields of an ``Algorithm`` whose options are ``MinibatchOptions``."""
