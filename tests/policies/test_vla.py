"""``ejax.policies.vla``: words, the flow's log-probabilities, the network, and the policy that they make."""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused

from ejax.algorithms.batch import evaluate_rollout
from ejax.algorithms.bc import ALGORITHM, BCConfig, _choose_frames, bc_loss, chunk_targets
from ejax.distributions import Normal
from ejax.numerics.text import as_bytes
from ejax.policies.normalize import update_normalizer
from ejax.policies.vla.config import HeadConfig, VLAConfig
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.policies.vla.network import Pointers
from ejax.policies.vla.policy import VLAPolicy, make
from ejax.policies.vla.words import Words, forget_words, split, vocabulary_of
from ejax.rollout import make_rollout
from ejax.types import Array, Params, PyTree, Rollout, Timestep

TEXTS = ("put the red cube in the left zone", "Move the blue-block to the right, please!", "é 12cube", " .", "")
K, A, ROWS = 2, 3, 4


@pytest.mark.parametrize("text", [*TEXTS, "an unknown RED word", "a b c d e f g h i", "red\u3000cube\xa0in"])
def test_bytes_become_the_same_tokens_inside_a_program(text: str) -> None:
    words = Words(vocabulary_of(TEXTS), max_words=8)
    assert np.array_equal(words.tokens_of(jnp.asarray(as_bytes(text, 48))), words.encode(text))


def test_words_of_a_text() -> None:
    assert split("Put the RED-cube, é12!") == ["put", "the", "red", "cube", "é12"]
    words = Words(("cube", "red"), max_words=4)
    assert words.encode("a red cube").tolist() == [1, 3, 2, 0]


@pytest.mark.parametrize(("words", "complaint"), [(("Red",), "not single words"), (("a", "a"), "twice")])
def test_a_vocabulary_of_other_than_words_is_refused(words: tuple[str, ...], complaint: str) -> None:
    refused(Words, words, match=complaint)


def test_forgotten_words_are_unknown_and_all_others_stay_as_they_are() -> None:
    words = Words(vocabulary_of(TEXTS), max_words=8)
    text = jnp.asarray(np.stack([as_bytes("put the RED-cube in the left zone", 48)] * 500))
    before, after = (np.asarray(words.tokens_of(x)) for x in (text, forget_words(text, jax.random.key(0), 0.3)))
    assert set(np.unique(after[after != before])) == {1}
    known = before > 1
    assert known.sum() == 500 * 8
    assert (after == 1)[known].mean() == pytest.approx(0.3, abs=0.03)
    assert ((after == 1) & known).any(axis=0).sum() == 8  # each place, apart from the others
    assert not ((after == 1) == (after == 1)[:1]).all()


@dataclass(frozen=True)
class LinearGaussian:
    """E[a − ε | x_τ = x] for a ~ N(mean, std²): the velocity of that flow, in closed form."""

    mean: float = 0.5
    std: float = 0.3

    def slope(self, tau: Any) -> tuple[Any, Any]:
        """α and β of v = α·x + β."""
        variance = (tau * self.std) ** 2 + (1.0 - tau) ** 2
        alpha = (tau * self.std**2 - (1.0 - tau)) / variance
        return alpha, self.mean - alpha * tau * self.mean

    def apply(self, variables: PyTree, context: PyTree, x: Array, tau: Array, method: str) -> Array:
        del variables, context, method
        alpha, beta = self.slope(tau[:, None, None])
        return alpha * x + beta


def flow(rows: int, **head: Any) -> FlowChunk:
    spec = FlowSpec(LinearGaussian(), K, A, HeadConfig(**head))
    return FlowChunk({}, (), spec, (rows,))


def steps_of(chunk: FlowChunk) -> list[tuple[float, float, float]]:
    """x' = A·x + b + s·n of each stochastic step, in float64."""
    head, found = chunk.spec.head, []
    network = chunk.spec.network
    assert isinstance(network, LinearGaussian)
    for number in range(head.num_steps):
        step, tau = 1.0 / head.num_steps, number / head.num_steps
        alpha, beta = network.slope(tau)
        half = 0.5 * head.noise_level**2
        slope = 1.0 + step * alpha - step * half * (1.0 - tau * alpha)
        found.append((slope, step * beta + step * half * tau * beta, head.noise_level * math.sqrt((1.0 - tau) * step)))
    return found


@pytest.mark.slow
def test_the_log_probability_of_a_path_is_that_of_a_linear_gaussian_process() -> None:
    chunk = flow(64, num_steps=5, stochastic_steps="all")
    decision = np.asarray(chunk.sample(jax.random.key(0)), np.float64).reshape(64, 6, K * A)
    path = np.concatenate([decision[:, 1:], decision[:, :1]], axis=1)
    # the path behind its start, x_1 … x_S, is jointly Gaussian: x = M·n + c·x_0 + d
    size, start = 5, path[:, 0]
    matrix, carried, offset = np.zeros((size, size)), np.zeros(size), np.zeros(size)
    row, factor, shift = np.zeros(size), 1.0, 0.0
    for i, (slope, intercept, scale) in enumerate(steps_of(chunk)):
        row, factor, shift = slope * row, slope * factor, slope * shift + intercept
        row[i] = scale
        matrix[i], carried[i], offset[i] = row, factor, shift
    residual = path[:, 1:] - carried[:, None] * start[:, None] - offset[:, None]
    covariance = matrix @ matrix.T
    quadratic = np.einsum("bia,ij,bja->b", residual, np.linalg.inv(covariance), residual)
    log_det = np.linalg.slogdet(2.0 * math.pi * covariance)[1]
    expected = -0.5 * quadratic - 0.5 * K * A * log_det
    assert np.allclose(chunk.log_prob(jnp.asarray(decision.reshape(64, -1), jnp.float32)), expected, rtol=1e-5)


def test_the_log_probability_of_one_step_is_that_steps() -> None:
    chunk = flow(200, num_steps=4)
    decision = np.asarray(chunk.sample(jax.random.key(1)), np.float64)
    before, after, number = decision[:, 6:12], decision[:, 12:18], decision[:, 18].astype(int)
    assert set(number) == {0, 1, 2, 3}
    slope, offset, scale = (np.array(each)[number][:, None] for each in zip(*steps_of(chunk), strict=True))
    z = (after - slope * before - offset) / scale
    expected = np.sum(-0.5 * z**2 - np.log(scale) - 0.5 * math.log(2.0 * math.pi), axis=1)
    assert np.allclose(chunk.log_prob(jnp.asarray(decision, jnp.float32)), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stochastic_steps", ["one", "all"])
def test_samples_are_distributed_as_the_flow_is_made_for(stochastic_steps: str) -> None:
    chunk = flow(20_000, num_steps=50, stochastic_steps=stochastic_steps, noise_level=0.7)
    action = np.asarray(jax.jit(lambda: chunk.env_action(chunk.sample(jax.random.key(2))))())
    assert action.mean() == pytest.approx(0.5, abs=0.01)
    assert action.std() == pytest.approx(0.3, abs=0.015)
    assert np.allclose(chunk.mode(), 0.5, atol=0.02)


@dataclass(frozen=True)
class Learned:
    """A velocity with parameters."""

    def apply(self, variables: PyTree, context: PyTree, x: Array, tau: Array, method: str) -> Array:
        del method
        return jnp.tanh(x * variables["w"][None] + context[:, None, None] + tau[:, None, None]) @ variables["m"]


@pytest.mark.slow
@pytest.mark.parametrize("stochastic_steps", ["one", "all"])
def test_the_gradient_of_a_log_probability_is_that_of_finite_differences(stochastic_steps: str) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        variables = {"w": jnp.asarray(rng.normal(size=(K, A))), "m": jnp.asarray(rng.normal(size=(A, A)))}
        spec = FlowSpec(Learned(), K, A, HeadConfig(num_steps=3, stochastic_steps=stochastic_steps))
        context = jnp.asarray(rng.normal(size=ROWS))
        decision = FlowChunk(variables, context, spec, (ROWS,)).sample(jax.random.key(0))

        def total(variables: PyTree) -> Array:
            return FlowChunk(variables, context, spec, (ROWS,)).log_prob(decision).sum()

        gradient = jax.grad(total)(variables)
        for name, x in variables.items():
            for index in np.ndindex(*x.shape):
                moved = [float(total({**variables, name: x.at[index].add(h)})) for h in (1e-5, -1e-5)]
                assert float(gradient[name][index]) == pytest.approx((moved[0] - moved[1]) / 2e-5, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_what_is_given_to_the_environment_is_the_chunk() -> None:
    chunk = flow(ROWS)
    decision = chunk.sample(jax.random.key(0))
    assert decision.shape == (ROWS, 3 * K * A + 1)
    assert np.array_equal(chunk.env_action(decision), decision[:, : K * A])
    assert np.array_equal(chunk.for_storage(decision).log_prob(decision), chunk.log_prob(decision))
    normal = Normal(jnp.zeros((ROWS, 2)), jnp.zeros((ROWS, 2)))
    assert normal.env_action(decision) is decision
    assert normal.for_storage(decision) is normal


def test_a_flow_has_no_exact_divergence() -> None:
    refused(lambda: flow(ROWS).kl(flow(ROWS)), match="leave out schedule: adaptive")
    with pytest.raises(ValueError, match="leave out schedule: adaptive"):
        flow(ROWS).for_storage(flow(ROWS).sample(jax.random.key(0))).kl(None)


def observations(rows: int = ROWS, *, batch: tuple[int, ...] | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    obs = {
        "image": rng.integers(0, 255, (rows, 16, 16, 3)).astype(np.uint8),
        "state": rng.normal(size=(rows, 5)).astype(np.float32),
        "instruction": np.stack([as_bytes(TEXTS[i % 2], 48) for i in range(rows)]),
    }
    return obs if batch is None else {name: x.reshape(*batch, *x.shape[1:]) for name, x in obs.items()}


SPACE = gymnasium.spaces.Dict(
    {
        "image": gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8),
        "state": gymnasium.spaces.Box(-9.0, 9.0, (5,)),
        "instruction": gymnasium.spaces.Box(0, 255, (48,), np.uint8),
    }
)
SMALL = {"width": 8, "depth": 2, "num_heads": 2, "image_encoder": {"channels": [2, 2, 4]}}


def small(normalize: bool = False, **model: Any) -> VLAPolicy:
    config = VLAConfig(model_config={**SMALL, **model}, inference_horizon=K)
    policy = make(config, gymnasium.spaces.Box(-1.0, 1.0, (K * A,)), SPACE, TEXTS, actor_obs_normalization=normalize)
    assert isinstance(policy, VLAPolicy)
    return policy


@cache
def variables_of(policy: VLAPolicy) -> Params:
    """Fresh ones, moved: a fresh head is zero, and so is B of a fresh adapter."""
    variables = jax.jit(policy.init)(jax.random.key(0), observations(1))
    move = partial(jax.tree.map, lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape))
    return jax.jit(move)(variables)


@pytest.fixture(scope="module")
def params() -> Params:
    return variables_of(small())


def mode_of(policy: VLAPolicy, obs: PyTree, params: Params | None = None) -> np.ndarray:
    params = variables_of(policy) if params is None else params
    return np.asarray(jax.jit(lambda params, obs: policy.apply(params, obs)[0].mode())(params, obs))


@pytest.mark.slow
def test_the_instruction_and_the_picture_change_the_action() -> None:
    policy, obs = small(), observations()
    action = mode_of(policy, obs)
    assert not np.allclose(action, mode_of(policy, {**obs, "instruction": obs["instruction"][::-1]}))
    assert not np.allclose(action, mode_of(policy, {**obs, "image": obs["image"][::-1]}))


@pytest.mark.slow
def test_padding_behind_the_instruction_does_not_change_the_action() -> None:
    policy, obs = small(), observations()
    longer = np.pad(obs["instruction"], ((0, 0), (0, 16)))
    assert np.allclose(mode_of(policy, obs), mode_of(policy, {**obs, "instruction": longer}), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("summary", ["sum", "mean"])
def test_a_word_that_training_did_not_have_changes_the_action_no_more_than_padding_does(summary: str) -> None:
    policy, obs = small(text_encoder={"summary": summary}), observations(2)
    known = [
        np.stack([as_bytes(text, 64)] * 2) for text in ("put the red cube", "put the red cube quietly frobnicated")
    ]
    expected, given = (mode_of(policy, {**obs, "instruction": text}) for text in known)
    np.testing.assert_allclose(given, expected, atol=1e-6)
    assert np.isfinite(mode_of(policy, {**obs, "instruction": as_bytes("zut", 64)[None].repeat(2, axis=0)})).all()


@pytest.mark.slow
def test_pictures_are_looked_at_with_the_sum_or_the_average_of_the_words() -> None:
    obs, params = observations(), variables_of(small())
    sums, means = (mode_of(small(text_encoder={"summary": how}), obs, params) for how in ("sum", "mean"))
    assert not np.allclose(sums, means)
    one = {**obs, "instruction": np.stack([as_bytes("cube", 48)] * ROWS)}
    sums, means = (mode_of(small(text_encoder={"summary": how}), one, params) for how in ("sum", "mean"))
    np.testing.assert_allclose(sums, means, atol=1e-6)


@pytest.mark.slow
def test_pointers_are_moved_by_the_words_and_by_nothing_that_the_words_do_not_name() -> None:
    """Parts of an instruction are averages of its tokens, and the trunk gets no others."""
    policy, obs = small(image_encoder={"type": "pointers", "channels": [2, 2, 4], "num_pointers": 3}), observations()
    action = mode_of(policy, obs)
    assert not np.allclose(action, mode_of(policy, {**obs, "instruction": obs["instruction"][::-1]}))
    longer = np.pad(obs["instruction"], ((0, 0), (0, 16)))
    np.testing.assert_allclose(mode_of(policy, {**obs, "instruction": longer}), action, atol=1e-6)
    pointers, text = Pointers(3, 8), jax.random.normal(jax.random.key(1), (1, 5, 6))
    read = jnp.array([[True, True, True, False, False]])
    variables = pointers.init(jax.random.key(0), text, read)
    parts = pointers.apply(variables, text, read)
    assert parts.shape == (1, 3, 8)  # type: ignore[union-attr]
    np.testing.assert_allclose(parts, pointers.apply(variables, text.at[:, 3:].set(9.0), read), atol=1e-6)
    twice = {**variables["params"], "value": jax.tree.map(lambda x: 2.0 * x, variables["params"]["value"])}
    np.testing.assert_allclose(pointers.apply({"params": twice}, text, read), 2.0 * parts, rtol=1e-5)  # type: ignore[operator]


@pytest.mark.slow
def test_predictions_are_taught_by_another_instruction_for_the_same_picture() -> None:
    texts, goals = gymnasium.spaces.Box(0, 255, (48,), np.uint8), gymnasium.spaces.Box(-9.0, 9.0, (2,))
    space = gymnasium.spaces.Dict({**SPACE.spaces, "goal": goals, "other_goal": goals, "other_instruction": texts})
    pointers = {"type": "pointers", "channels": [2, 2, 4], "num_pointers": 3}
    model = {**SMALL, "image_encoder": pointers, "predicts": ["goal"], "asks": "other_"}
    config = VLAConfig(model_config=model, inference_horizon=K)
    box = gymnasium.spaces.Box(-1.0, 1.0, (K * A,))
    policy, obs = make(config, box, space, TEXTS, actor_obs_normalization=True), observations()
    assert policy.predicts == ("other_goal",)
    goal = np.random.default_rng(0).normal(5.0, 0.1, (ROWS, 2)).astype(np.float32)
    fresh = {**variables_of(policy), "normalizer": policy.init(jax.random.key(0), obs)["normalizer"]}
    params = update_normalizer(policy, fresh, jax.tree.map(lambda x: x[None], {**obs, "goal": goal}))
    other = {**obs, "instruction": obs["instruction"][::-1]}
    seen = policy.apply(params, {**obs, "other_instruction": other["instruction"]}, predict=True)[2]
    np.testing.assert_allclose(seen["goal"], policy.apply(params, obs, predict=True)[2]["goal"], atol=1e-5)
    np.testing.assert_allclose(seen["other_goal"], policy.apply(params, other, predict=True)[2]["goal"], atol=1e-5)
    assert np.abs(seen["goal"] - seen["other_goal"]).max() > 1e-4
    np.testing.assert_allclose(params["normalizer"]["targets"]["mean"], goal.mean(axis=0), rtol=1e-5)
    assert np.abs(np.asarray(seen["goal"]) - 5.0).max() < 2.0  # from the first update on
    # the joint angles, which reveal what the arm is after, have no part in it
    moved = policy.apply(params, {**obs, "state": obs["state"] + 1.0}, predict=True)[2]
    np.testing.assert_array_equal(moved["goal"], policy.apply(params, obs, predict=True)[2]["goal"])
    batch = {"obs": {name: x[:, None] for name, x in obs.items()}, "action": jnp.zeros((ROWS, K, A))}
    for given in ({}, {"other_goal": goal[:, None]}):  # no answer; an answer without its question
        left_out = {**batch, "obs": {**batch["obs"], **given}}
        refused(bc_loss, params, left_out, policy=policy, config=BCConfig(loss="flow"), match="lack other_goal .*asks")
    with pytest.raises(ValueError, match="other_goal"):
        make(config, box, SPACE, TEXTS)
    with pytest.raises(ValueError, match="asks"):
        VLAConfig(model_config={**SMALL, "predicts": ["goal"], "asks": "other_"})


@pytest.mark.slow
def test_leading_axes_are_kept() -> None:
    policy, obs = small(), observations()
    params = variables_of(policy)
    distribution, value = policy.apply(params, observations(batch=(2, 2)))
    assert value.shape == (2, 2)
    decision = distribution.sample(jax.random.key(0))
    assert decision.shape == (2, 2, 3 * K * A + 1)
    flat = policy.apply(params, obs)[0]
    assert np.allclose(
        distribution.log_prob(decision).reshape(-1), flat.log_prob(decision.reshape(ROWS, -1)), atol=1e-5
    )


@pytest.mark.slow
def test_a_gaussian_head_makes_a_normal_of_the_chunk() -> None:
    policy = small(head={"type": "gaussian"}, critic=True)
    distribution, value = policy.apply(variables_of(policy), observations())
    assert isinstance(distribution, Normal)
    assert distribution.mean.shape == (ROWS, K * A)
    assert np.ptp(value) > 0


@pytest.mark.slow
def test_merged_adapters_act_as_unmerged_ones() -> None:
    policy, obs = small(lora={"rank": 2}), observations()
    params = variables_of(policy)
    merged, plain = policy.merge(params), small()
    assert jax.tree.structure(merged) == jax.tree.structure(jax.eval_shape(plain.init, jax.random.key(0), obs))
    assert np.allclose(mode_of(plain, obs, merged), mode_of(policy, obs), atol=2e-6)
    without = {"params": {**params["params"]}, "frozen": params["frozen"]}
    without["params"] = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if path[-1].key == "lora_b" else x, params["params"]
    )
    assert not np.allclose(mode_of(policy, obs, without), mode_of(policy, obs), atol=1e-3)


@pytest.mark.slow
def test_a_policy_with_adapters_starts_as_the_policy_that_it_adopts() -> None:
    policy, obs = small(lora={"rank": 2}), observations()
    plain = small()
    given, own = variables_of(plain), jax.jit(policy.init)(jax.random.key(5), obs)
    assert np.allclose(mode_of(policy, obs, policy.adopt(given, own)), mode_of(plain, obs), atol=1e-6)


def test_only_adapters_and_what_is_outside_the_trunk_are_trained() -> None:
    policy = small(lora={"rank": 2})
    params = jax.eval_shape(policy.init, jax.random.key(0), observations())
    trained = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(params["params"]["blocks_0"])}
    assert trained == {"lora_a", "lora_b", "scale", "bias"}
    kernels = {path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(params["frozen"]["blocks_0"])}
    assert kernels == {"qkv", "out", "mlp_in", "mlp_out"}


@pytest.mark.slow
def test_recomputing_blocks_changes_no_gradient() -> None:
    policy, obs = small(), observations()
    params = variables_of(policy)

    def gradient(policy: VLAPolicy) -> PyTree:
        def loss(params: Params) -> Array:
            return jnp.square(policy.apply(params, obs)[0].mode()).sum()

        return jax.jit(jax.grad(loss))(params)

    both = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-5), gradient(policy), gradient(small(remat=True)))
    assert jax.tree.all(both)


@pytest.mark.slow
def test_bfloat16_products_stay_near_float32(params: Params) -> None:
    obs = observations()
    near = mode_of(small(torch_dtype="bfloat16"), obs, params)
    assert near.dtype == np.float32
    assert 0.0 < np.abs(near - mode_of(small(), obs, params)).max() < 0.1


@pytest.mark.slow
def test_an_instruction_of_the_config_stands_in_for_one_of_the_observation() -> None:
    config = {"model_config": SMALL, "inference_horizon": K}
    space = gymnasium.spaces.Dict({name: SPACE[name] for name in ("image", "state")})
    box = gymnasium.spaces.Box(-1.0, 1.0, (K * A,))
    fixed = make(VLAConfig(**config, instruction=TEXTS[0]), box, space)
    given = make(VLAConfig(**config), box, SPACE, TEXTS[:1])
    obs = observations()
    obs["instruction"] = np.stack([as_bytes(TEXTS[0], 48)] * ROWS)
    params = variables_of(given)
    seen = {name: obs[name] for name in ("image", "state")}
    assert np.allclose(mode_of(fixed, seen, params), mode_of(given, obs, params), atol=1e-4)
    refused(lambda: make(VLAConfig(**config), box, space), match=r"vla_config\.instruction is not given")


@cases(
    "model horizon complaint",
    ({"images": ["wrist"]}, K, "model_config names wrist"),
    ({}, 4, "inference_horizon 4 does not divide"),
    ({"width": 10, "num_heads": 4}, K, "multiple of 2 x num_heads"),
    ({"image_encoder": {"typ": "patches"}}, K, "typ"),
    ({"images": ["state"]}, K, r"'state' must be uint8 \[H, W, 3\]"),
    ({"predicts": ["goal"]}, K, "model_config names goal"),
    ({"text_encoder": {"max_words": 7}}, K, "max_words is 7, but an instruction has 8 words: 'put the red"),
)
def test_a_config_that_does_not_fit_is_refused(model: dict[str, Any], horizon: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make(
            VLAConfig(model_config=model, inference_horizon=horizon),
            gymnasium.spaces.Box(-1.0, 1.0, (K * A,)),
            SPACE,
            TEXTS,
        )


@pytest.mark.slow
def test_patches_that_do_not_fill_the_picture_are_refused() -> None:
    with pytest.raises(ValueError, match="patch_size 5 must divide"):
        small(image_encoder={"type": "patches", "patch_size": 5}).init(jax.random.key(0), observations())
    policy = small(image_encoder={"type": "patches", "patch_size": 4})
    assert mode_of(policy, observations()).shape == (ROWS, K * A)


@pytest.mark.slow
def test_a_rollout_keeps_the_log_probability_of_a_flow(params: Params) -> None:
    policy, obs = small(), observations(batch=(2, 2))
    flags = np.zeros((2, 2), bool)
    timestep = Timestep(
        obs=obs, reward=np.zeros((2, 2), np.float32), terminated=flags, truncated=flags, info={}, final_obs=obs
    )

    @jax.jit
    def act(obs: PyTree) -> tuple[Rollout, Array]:
        distribution = policy.apply(params, obs)[0]
        decision = distribution.sample(jax.random.key(0))
        return make_rollout(policy, params, obs, decision, timestep), distribution.log_prob(decision)

    rollout, log_prob = act(obs)
    assert sum(x.size for x in jax.tree.leaves(rollout.distribution)) == 4
    assert np.allclose(rollout.log_prob, log_prob, atol=1e-6)


@pytest.mark.slow
def test_large_pictures_are_looked_at_step_by_step_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, obs = small(), observations(batch=(2, 2))
    params = variables_of(policy)
    action = policy.apply(params, obs)[0].sample(jax.random.key(0))
    flags = jnp.zeros((2, 2), bool)
    timestep = Timestep(obs=obs, reward=jnp.zeros((2, 2)), terminated=flags, truncated=flags, info={}, final_obs=obs)
    rollout = make_rollout(policy, params, obs, action, timestep)
    together = evaluate_rollout(params, rollout, None, policy=policy)
    rows: list[int] = []
    monkeypatch.setattr("ejax.numerics.kernels._LARGE_OBS", 1)
    apply = VLAPolicy.apply

    def counted(self: VLAPolicy, params: Params, obs: PyTree) -> Any:
        rows.append(obs["image"].ndim)
        return apply(self, params, obs)

    monkeypatch.setattr(VLAPolicy, "apply", counted)
    one_by_one = evaluate_rollout(params, rollout, None, policy=policy)
    assert rows == [4]  # traced once, for [N, H, W, 3]
    chex.assert_trees_all_close(together, one_by_one, rtol=1e-5, atol=1e-5)


def test_cloning_a_flow_makes_its_velocity_the_difference_of_action_and_noise() -> None:
    target = jnp.full((64, K, A), 0.5)
    chunk = FlowChunk({}, (), FlowSpec(LinearGaussian(std=1e-3), K, A, HeadConfig(samples_per_row=8)), (64,))
    # for one single action, a, the true velocity at x_τ is (a − x_τ) / (1 − τ) = a − ε
    assert float(chunk.matching_loss(target, jax.random.key(0)).mean()) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("head", "wrong"), [("flow", "nll"), ("gaussian", "flow")])
def test_a_loss_of_another_head_is_refused(head: str, wrong: Any) -> None:
    policy, obs = small(head={"type": head}), observations(batch=(2, 2))
    batch = {"obs": obs, "action": jnp.zeros((2, 2, A)), "noise_seed": jnp.zeros(2, jnp.uint32)}
    with pytest.raises(ValueError, match=f"loss '{wrong}' does not fit this policy"):
        bc_loss(variables_of(policy), batch, policy=policy, config=BCConfig(loss=wrong))


@pytest.mark.slow
def test_the_error_of_what_a_policy_predicts_besides_is_added_to_the_loss() -> None:
    policy, obs = small(predicts=["state"]), observations(batch=(2, 2))
    batch = {"obs": obs, "action": jnp.zeros((2, 2, A)), "noise_seed": jnp.zeros(2, jnp.uint32)}
    params = variables_of(policy)
    loss = partial(bc_loss, params, batch, policy=policy)
    with_it, metrics = loss(config=BCConfig(loss="flow", prediction_coef=2.0))
    _, _, predicted = policy.apply(params, obs, predict=True)
    error = np.square(predicted["state"] - obs["state"]).mean()
    np.testing.assert_allclose(metrics["prediction"], error, rtol=1e-5)
    np.testing.assert_allclose(with_it - metrics["flow"], 2.0 * error, rtol=1e-5)


def test_words_are_dropped_for_a_policy_that_reads_words_and_refused_for_any_other() -> None:
    options = BCConfig(loss="flow", word_dropout=0.5)
    assert not list(ALGORITHM.policy_problems(options, small()))
    (problem,) = ALGORITHM.policy_problems(options, replace(small(), instruction=(103, 111)))
    assert "reads no words" in str(problem)


@pytest.mark.slow
def test_what_is_padded_has_no_part_in_the_error_of_predictions() -> None:
    """Each window has the weight of the actions that it teaches: 3 (two chunks, of two and of one) and 1."""
    policy, obs = small(predicts=["state"]), observations(batch=(2, 2))
    mask = jnp.array([[True, True], [True, False]])
    batch = {"obs": obs, "action": jnp.zeros((2, 2, A)), "noise_seed": jnp.zeros(2, jnp.uint32)}
    batch |= {"valid": mask, "loss_mask": mask}
    params = variables_of(policy)
    _, metrics = bc_loss(params, batch, policy=policy, config=BCConfig(loss="flow"))
    _, _, predicted = policy.apply(params, obs, predict=True)
    error = np.square(predicted["state"] - obs["state"]).mean(axis=-1)
    np.testing.assert_allclose(metrics["prediction"], 0.75 * error[0].mean() + 0.25 * error[1, 0], rtol=1e-5)


@pytest.mark.slow
def test_what_a_policy_predicts_depends_on_picture_and_instruction() -> None:
    policy, obs = small(predicts=["state"]), observations()
    predicted = partial(policy.apply, variables_of(policy), predict=True)
    other = {**obs, "image": obs["image"][::-1]}
    assert not np.allclose(predicted(obs)[2]["state"], predicted(other)[2]["state"])
    other = {**obs, "instruction": obs["instruction"][::-1]}
    assert not np.allclose(predicted(obs)[2]["state"], predicted(other)[2]["state"])


@pytest.mark.slow
def test_the_first_frame_of_a_window_is_always_asked() -> None:
    action = jnp.zeros((64, 8, 1))
    chosen = _choose_frames(
        {"obs": {"t": jnp.tile(jnp.arange(8)[None], (64, 1))}, "action": action}, jax.random.key(0), 3
    )
    assert (chosen["frame"][:, 0] == 0).all()
    assert np.array_equal(chosen["obs"]["t"], chosen["frame"])
    assert all(len(set(row)) == 3 for row in chosen["frame"].tolist())
    assert set(chosen["frame"].ravel().tolist()) == set(range(8))


@pytest.mark.slow
def test_chunks_may_begin_at_some_frames_only() -> None:
    action = jnp.arange(2 * 5, dtype=jnp.float32).reshape(2, 5, 1)
    target, known = chunk_targets(action, 3, jnp.array([[0, 4], [1, 3]]))
    assert target[..., 0].tolist() == [[[0, 1, 2], [4, 4, 4]], [[6, 7, 8], [8, 9, 9]]]
    assert known.tolist() == [[[1, 1, 1], [1, 0, 0]], [[1, 1, 1], [1, 1, 0]]]
    whole, all_known = chunk_targets(action, 3)
    again, known_too = chunk_targets(action, 3, jnp.broadcast_to(jnp.arange(5)[None], (2, 5)))
    assert np.array_equal(whole, again)
    assert np.array_equal(all_known, known_too)
