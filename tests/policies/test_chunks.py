"""Chunks at execution: hand-made sequences, the guidance of a small flow, seams, and the same in a program."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from small_flow import HORIZON, Flow, InUnits, Wander, learned

from ejax.evaluation import evaluate
from ejax.play.chunks import ExecutedPolicy, MeasuredEnv
from ejax.policies.chunks import Execution

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from chunk_player import ChunkPlayer


def played(rule: Execution, num_steps: int) -> tuple[list[float], float]:
    """Play chunks whose action i is i/100 more than the step that asked, in ±50; their actions, the largest jump."""
    chunk = np.arange(HORIZON)[:, None] / 100
    with ChunkPlayer(rule, lambda obs, plan, weights: obs + chunk, [-50.0], [50.0]) as player:
        actions = [round(float(player(np.array([float(step)]))[0]), 3) for step in range(num_steps)]
    return actions, player.largest_jump


@cases(
    "method latency every keeps actions jump",
    ("sync", 0, 4, False, [0, 0.01, 0.02, 0.03, 4, 4.01, 4.02, 4.03, 8], 3.97),
    ("sync", 2, 3, False, [0, 0, 0, 0.01, 0.02, 0, 0, 5, 5.01, 5.02, 0], 5.02),
    ("sync", 2, 3, True, [0, 0, 0, 0.01, 0.02, 0.02, 0.02, 5, 5.01, 5.02, 5.02], 4.98),
    ("async", 2, 4, False, [0, 0, 0.02, 0.03, 0.04, 0.05, 4.02, 4.03, 4.04, 4.05, 8.02], 3.97),
    ("async", 4, 4, False, [0, 0, 0, 0, 0.04, 0.05, 0.06, 0.07, 4.04, 4.05], 3.97),
    ("rtc", 2, 4, False, [0, 0, 0.02, 0.03, 0.04, 0.05, 4.02, 4.03], 3.97),
)
def test_a_chunk_is_asked_for_and_gone_over_to_in_its_steps(
    method: str, latency: int, every: int, keeps: bool, actions: list[float], jump: float
) -> None:
    found, largest = played(Execution(method, HORIZON, latency, every, (keeps,)), len(actions))
    np.testing.assert_allclose(found, actions, atol=1e-9)
    assert largest == pytest.approx(jump / 100)


@pytest.mark.parametrize(("latency", "every", "decay"), [(0, 1, 0.5), (2, 2, 0.5), (1, 3, 0.0)])
def test_ensembling_weighs_all_chunks_of_a_step_by_their_age(latency: int, every: int, decay: float) -> None:
    found, _ = played(Execution("ensemble", HORIZON, latency, every, decay=decay), 20)
    for step in range(latency, 20):
        asked = [ask for ask in range(0, step - latency + 1, every) if step - ask < HORIZON]
        weights = np.exp(-decay * np.arange(len(asked)))  # the oldest first
        expected = sum(w * (ask + (step - ask) / 100) for w, ask in zip(weights, asked, strict=True)) / weights.sum()
        assert found[step] == pytest.approx(expected, abs=1e-3)


def test_rtc_freezes_what_is_executed_meanwhile_and_frees_the_end() -> None:
    weights = Execution("rtc", HORIZON, latency=2, every=3).weights
    c = (5 - np.arange(2, 5)) / 4
    expected = [1, 1, *(c * (np.exp(c) - 1) / (np.e - 1)), 0, 0, 0]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@cases(
    "rule text",
    (("rct", 8), "no way to execute chunks 'rct'; there is sync, async, ensemble, rtc"),
    (("async", 8, 5), "8 actions, 5 steps late, got one in 5 steps; allowed: none"),
    (("rtc", 8, 2, 7), r"got one in 7 steps; allowed: 2 … 6"),
    (("sync", 8, 2, 9), r"allowed: 1 … 8"),
    (("ensemble", 8, -1), "allowed: none: the latency is out of range"),
)
def test_what_a_chunk_is_too_short_for_is_refused(rule: Any, text: str) -> None:
    refused(Execution, *rule, match=text)


def test_guidance_of_0_is_the_mode_and_more_of_it_is_nearer_to_the_plan() -> None:
    obs = jnp.linspace(-0.1, 0.1, 5)[:, None]
    distribution = Flow().apply(learned(), obs)[0]
    plan = distribution.mode().reshape(5, HORIZON, 1)[::-1]  # of the other side
    weights = np.broadcast_to(Execution("rtc", HORIZON, 2, 4).weights, (5, HORIZON))
    made = [distribution.continued(plan, weights, most) for most in (0.0, 1.0, 5.0)]
    np.testing.assert_allclose(made[0], distribution.mode(), atol=1e-6)
    np.testing.assert_allclose(distribution.continued(plan, 0 * weights, 5.0), distribution.mode(), atol=1e-6)
    far = [float(jnp.abs(each.reshape(plan.shape) - plan)[:, :2].mean()) for each in made]
    assert far[2] < 0.6 * far[0] and far[2] < far[1] < far[0]


def test_seams_of_rtc_jump_less_than_naive_ones_and_without_guidance_as_much() -> None:
    def jumps(method: str, **options: float) -> Any:
        rule = Execution(method, HORIZON, 2, 4, **options)  # type: ignore[arg-type]
        policy, env = ExecutedPolicy(Flow(), rule, 1), MeasuredEnv(Wander(), rule)
        found = evaluate(policy, env, learned(), jax.random.key(2), num_envs=16, num_episodes=16)
        return np.asarray(found["metrics/largest_jump"])

    naive, guided = jumps("async"), jumps("rtc")
    np.testing.assert_allclose(jumps("rtc", guidance=0.0), naive, atol=1e-5)
    assert naive.max() > 0.25 and guided.max() <= naive.max() and guided.mean() < 0.7 * naive.mean()


def test_a_plan_is_converted_to_the_units_of_the_network() -> None:
    obs, weights = jnp.linspace(-0.1, 0.1, 5)[:, None], np.broadcast_to(Execution("rtc", HORIZON, 2, 4).weights, (5, 8))
    plain = Flow().apply(learned(), obs)[0]
    converted = replace(plain, spec=replace(plain.spec, network=InUnits(), robot_dim=1))
    plan = plain.mode().reshape(5, HORIZON, 1)[::-1]
    expected = 2.0 * plain.continued(plan, weights, 5.0)
    np.testing.assert_allclose(converted.continued(2.0 * plan, weights, 5.0), expected, atol=1e-5)


@pytest.mark.parametrize(("method", "every"), [("sync", 3), ("ensemble", 2), ("rtc", 4)])
def test_a_program_executes_as_a_robot_does(method: str, every: int) -> None:
    rule, params = Execution(method, HORIZON, 2, every, (True,)), learned()
    policy = ExecutedPolicy(Flow(), rule, 1)
    apply = jax.jit(policy.apply)

    def infer(obs: Any, plan: Any, weights: Any) -> Any:
        distribution = Flow().apply(params, obs[None])[0]
        made = distribution.mode() if plan is None else distribution.continued(plan[None], weights[None], 5.0)
        return np.asarray(made).reshape(HORIZON, 1)

    memory, observations = policy.init_memory(1), 0.1 * np.sin(np.arange(18.0, dtype=np.float32))[:, None]
    with ChunkPlayer(rule, infer, [-9.0], [9.0]) as player:
        for obs in observations:
            distribution, _, memory = apply(params, obs[None], memory=memory)
            np.testing.assert_allclose(distribution.mode()[0], player(obs), atol=1e-5)
