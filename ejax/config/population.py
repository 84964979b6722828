"""``population``: many trainings in one program, which differ in their seeds and in numbers of the algorithm's options.

    population: {seeds: 16, algorithm.cfg.optimizer.learning_rate: [1e-4, 3e-4, 1e-3]}

are 48 members: every seed with every combination of the listed values. The values are the members' own, all else is the
config's, ``trainer.eval_seed`` included, so that all are evaluated in the same episodes.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from flax.core import FrozenDict
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from ejax.config.embodichain.spellings import canonical_key
from ejax.schema.frozen import StrictModel, freeze, thaw, with_value
from ejax.schema.messages import short_repr
from ejax.schema.paths import leaves

OPTIONS = "algorithm.cfg."  # prefix of the keys in which members may differ, besides the seed
SEPARATELY = "examples/sweep.py trains each member as a separate run, in which any key may differ"
"""The remedy for what members of one program cannot differ in."""
_REMOVED = ("separate_runs", "apart")
_KEY = r"^(algorithm|trainer|policy|env|data)(\..+)?$"
_Seed = Annotated[int, Field(ge=0, lt=2**31)]


class ExploitConfig(StrictModel):
    """``population.exploit``: population-based training (Jaderberg et al. 2017).

    From time to time the members with the lowest returns continue from the parameters of some with the highest, and
    with their numbers, each multiplied by one of ``perturb``."""

    every: PositiveInt
    """Updates from one time to the next."""
    fraction: float = Field(default=0.25, gt=0.0, le=0.5)
    """Share of the members that copy, and of those that are copied; rounded down, at least one."""
    perturb: tuple[PositiveFloat, ...] = Field(default=(0.8, 1.25), min_length=1)
    """Factors; each copied number is multiplied by one of them, at random."""


class PopulationConfig(StrictModel):
    """``population``: which members train together in one program."""

    model_config = ConfigDict(json_schema_extra={"patternProperties": {_KEY: {"title": "As in vary"}}})
    seeds: PositiveInt | tuple[_Seed, ...] = 1
    """A list, or how many: then ``trainer.seed`` and those after it."""
    vary: Annotated[dict[str, tuple[Any, ...]], AfterValidator(freeze), PlainSerializer(thaw)] = Field(
        default_factory=dict, validate_default=True
    )
    """Dotted key of ``algorithm.cfg`` -> the values that members have; may be written directly under ``population``."""
    exploit: ExploitConfig | None = None
    """Population-based training: the worst continue from the best. None: members do not meet."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        """Read lists under dotted keys, or under sections as overrides make them, as ``vary``."""
        if not isinstance(given, Mapping):
            return given
        if any(given.get(name) for name in _REMOVED):
            raise ValueError(f"separate_runs was removed: {SEPARATELY}")
        # runs of earlier versions have it as false; and after a validator in Python, strict models take no list for a
        # tuple
        given = {name: _tuples(value) for name, value in given.items() if name not in _REMOVED}
        own = {name: value for name, value in given.items() if name in cls.model_fields}
        rest = {name: value for name, value in given.items() if name not in cls.model_fields}
        listed = own.get("vary") or {}
        if not isinstance(listed, Mapping) or not all("." in name or re.match(_KEY, name) for name in rest):
            return given
        # a file may spell a key in one piece, and an override, which comes later and counts, as sections
        given = leaves({**listed, **rest}) if listed or rest else []
        vary = {canonical_key(".".join(map(str, path))): values for path, values in given}
        return {**own, "vary": vary}

    @field_validator("seeds")
    @classmethod
    def _different(cls, seeds: Any) -> Any:
        if isinstance(seeds, tuple) and (not seeds or len(set(seeds)) < len(seeds)):
            raise ValueError(f"got {short_repr(list(seeds))}; must be different seeds, at least one, or their number")
        return seeds

    @field_validator("vary")
    @classmethod
    def _lists(cls, vary: FrozenDict) -> FrozenDict:
        for key, values in vary.items():
            if not key.startswith(OPTIONS):
                remedy = "use population.seeds" if key == "trainer.seed" else SEPARATELY
                raise ValueError(f"got {key}; members may differ only in numbers of {OPTIONS}…; {remedy}")
            if not values or len(set(values)) < len(values):
                raise ValueError(f"got {short_repr(thaw(values))} for {key}; must be a list of different values")
        return vary


class Member(NamedTuple):
    number: int
    seed: int
    values: dict[str, Any]  # dotted key of the config -> its value


def members_of(population: PopulationConfig, seed: int) -> Iterator[Member]:
    """Return the members: all seeds, from ``trainer.seed`` on, of the first combination of values, then of the next."""
    given = population.seeds
    seeds = given if isinstance(given, tuple) else range(seed, seed + given)
    combinations = itertools.product(*population.vary.values())
    for number, (values, each) in enumerate(itertools.product(combinations, seeds)):
        yield Member(number, each, dict(zip(population.vary, values, strict=True)))


def with_member(tree: Mapping[str, Any], member: Member) -> dict[str, Any]:
    """Return a config's canonical form as that of one member, which is a run like any other."""
    own = {**tree, "population": None}
    for key, value in {"trainer.seed": member.seed, **member.values}.items():
        own = with_value(own, key, thaw(value))
    return own


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
