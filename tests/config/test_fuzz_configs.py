"""A fixed slice of ``benchmarks/fuzz_configs.py``."""

from pathlib import Path
from typing import Any

import config_mutants
import config_verdicts
import pytest

SLICES = 12
MUTANTS = 25
EVERYDAY = 4
"""Slices of the everyday run; ``tests/check.sh --all`` has the others too."""


@pytest.fixture(scope="module")
def found() -> Any:
    return config_mutants.bases()


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] if part >= EVERYDAY else []) for part in range(SLICES)]
)
def test_a_broken_config_is_refused_in_short_or_trains_as_it_reads(part: int, found: Any, tmp_path: Path) -> None:
    wrong = []
    for number in range(part * MUTANTS, (part + 1) * MUTANTS):
        mutant = config_mutants.mutant(found, 0, number)
        verdict = config_verdicts.judge(mutant, tmp_path)
        if verdict.outcome not in ("refused", "accepted"):
            wrong.append(f"{verdict.outcome}: {mutant.label}: {verdict.text}")
    assert not wrong, "\n".join(wrong)


def test_a_mutant_is_a_function_of_seed_and_number(found: Any) -> None:
    assert config_mutants.mutant(found, 3, 17) == config_mutants.mutant(config_mutants.bases(), 3, 17)
    assert config_mutants.mutant(found, 3, 17) != config_mutants.mutant(found, 4, 17)
