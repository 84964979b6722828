"""Programs that a stepper compiles."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tiny import tiny

from ejax.config import parse_config
from ejax.training import programs, steppers
from ejax.training.build import build
from ejax.training.host_steppers import HostStepper


@pytest.mark.slow
def test_a_run_that_goes_on_is_stepped_by_the_program_that_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays read from a checkpoint are bound to its device. Lowered otherwise, the program would compile again."""
    texts = []
    repeat_step = steppers.repeat_step

    def uncompiled(*args: Any, **options: Any) -> SimpleNamespace:
        program: Callable[..., Any] = repeat_step(*args, **options).trace

        def trace(*given: Any) -> SimpleNamespace:
            texts.append(program(*given).lower().as_text())
            return SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: None))

        return SimpleNamespace(trace=trace)

    monkeypatch.setattr(steppers, "repeat_step", uncompiled)
    monkeypatch.setattr(programs, "_kept", OrderedDict())
    monkeypatch.setattr(programs, "_MOST", 0)  # each start lowers its own
    parts = build(parse_config(tiny()))
    read = jax.device_put(parts.state, jax.devices()[0])
    half = replace(parts.state, train=read.train)  # as after policy.init_from
    for state in (parts.state, read, half):
        parts.stepper.start(state)
    assert texts[0] == texts[1] == texts[2]


def test_without_the_others_parts_there_is_no_update_and_the_state_stays() -> None:
    parts = build(parse_config(tiny(collector={"mode": "host"})))
    assert isinstance(parts.stepper, HostStepper)
    gathered: list[Any] = []

    def gather(own: Any, purpose: str) -> list[Any]:
        gathered.append(own)
        return [own, None]  # the other process was stopped

    parts.stepper._group = SimpleNamespace(gather=gather)
    with parts.stepper as stepper:
        state = stepper.start(parts.state)
        assert stepper.advance(state, 1, lambda: False) is None
        assert gathered[0]["facts"] and int(state.update) == 0
