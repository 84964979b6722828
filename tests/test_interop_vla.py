"""Exports of vision-language-action policies: the same answers and tokens everywhere, driven by text."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejax.policies.vla.config import VLAConfig
from ejax.policies.vla.loading import load_parts
from ejax.policies.vla.policy import VLAPolicy, make
from ejax.policies.vla.words import Words, as_bytes
from ejax.types import Params, Timestep
from ejax.weights import WeightsError, fit_weights
from interop.artefacts.formats import FORMATS
from interop.artefacts.parity import ParityError, load_cases
from interop.artefacts.texts import adversarial_texts
from interop.checkpoints.weights import state_dict_from_params
from interop.export import export_policy
from interop.twin.describe import vla_spec_of
from interop.twin.kinds import load_spec
from interop.twin.text import Tokenizer
from interop.twin.vla_spec import VLASpec
from interop.verify import sha256, verify

ROOT = Path(__file__).parents[1]
HERE = [name for name in FORMATS if not FORMATS[name].missing(to_write=True)]


def needs(name: str) -> Any:
    """Skips where that format cannot be written."""
    missing = " ".join(FORMATS[name].missing(to_write=True))
    return pytest.mark.skipif(bool(missing), reason=f"{name} needs pip install {missing}")


K, A = 2, 3
TEXTS = ("put the red cube left", "put the blue cube right", "Move the red one!")
LENGTH = 32
SAID = np.stack([as_bytes(text, LENGTH) for text in TEXTS])
ORIGIN = {"checkpoint": "none", "global_step": 0, "env": {"id": "Talk", "cfg": {}}}


@dataclasses.dataclass(frozen=True)
class Talk:
    """A coloured picture, an instruction, joints, and a state of a simulator that the policy does not look at."""

    shape: tuple[int, int, int] = (9, 8, 3)
    text: bool = True
    max_episode_steps: int = 4
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (K * A,))
    instructions = TEXTS

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        parts: dict[str, Any] = {
            "image": gymnasium.spaces.Box(0, 255, self.shape, np.uint8),
            "scene": gymnasium.spaces.Box(-9, 9, (3,)),
            "state": gymnasium.spaces.Box(-9, 9, (4,)),
        }
        text = {"instruction": gymnasium.spaces.Box(0, 255, (LENGTH,), np.uint8)} if self.text else {}
        return gymnasium.spaces.Dict(parts | text)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        state = jax.random.uniform(key, (7,), minval=-1.0), jax.random.randint(key, (), 0, len(TEXTS))
        return state, self._observe(state)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del key
        x = jnp.clip(state[0] + 0.1 * jnp.pad(jnp.clip(action, -1.0, 1.0), (0, 1)), -9.0, 9.0)
        never = jnp.bool_(False)
        state = (x, state[1])
        return state, Timestep(obs=self._observe(state), reward=x.sum(), terminated=never, truncated=never, info={})

    def _observe(self, state: Any) -> Any:
        x, said = state
        row = jnp.linspace(-1.0, 1.0, self.shape[0])[:, None, None] - x[0]
        column = jnp.linspace(-1.0, 1.0, self.shape[1])[None, :, None] - x[1]
        colour = jnp.asarray([200.0, 90.0, 30.0])[None, None]
        image = (jnp.exp(-3.0 * (row**2 + column**2)) * colour + 40.0).astype(jnp.uint8)
        text = {"instruction": jnp.asarray(SAID)[said]} if self.text else {}
        return {"image": image, "scene": x[:3], "state": x[3:], **text}


TINY = {"width": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2, "image_encoder": {"channels": [2, 3, 4]}}
FLOW = {"num_steps": 3}
POLICIES: dict[str, dict[str, Any]] = {
    "keypoints": {"head": FLOW, "lora": {"rank": 2}},
    "gaussian": {
        "image_encoder": {"type": "patches", "patch_size": 4},
        "head": {"type": "gaussian"},
        "critic": True,
        "torch_dtype": "bfloat16",
    },
    "pretrained": {
        "image_encoder": {"type": "efficientnet", "stride": 8},
        "text_encoder": {"type": "minilm", "max_words": 8},
        "head": FLOW,
    },
}
ENVS = {"gaussian": Talk((8, 12, 3))}


@functools.cache
def made(name: str) -> tuple[VLAPolicy, Params]:
    """One of ``POLICIES`` with a normalizer, and random weights."""
    return build(ENVS.get(name, Talk()), **POLICIES[name])


def build(env: Talk, *, instruction: str | None = None, **model: Any) -> tuple[VLAPolicy, Params]:
    model = {**TINY, "text_encoder": {"max_words": 6}, **model}
    config = VLAConfig(model_config=model, inference_horizon=K, instruction=instruction)
    spaces = (env.action_space, env.observation_space)
    policy = make(config, *spaces, TEXTS, actor_obs_normalization=True)
    obs = jax.eval_shape(lambda: jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1))[1])
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    rng = np.random.default_rng(0)

    def drawn(path: Any, x: Any) -> Any:
        fan_in = np.prod(x.shape[:-1]) if x.ndim > 1 else 4
        y = rng.normal(size=x.shape) * (0.7 / np.sqrt(max(float(fan_in), 1.0)))
        return jnp.asarray(np.abs(y) + 0.5 if path[-1].key in ("variance", "count", "scale") else y, x.dtype)

    return policy, jax.tree_util.tree_map_with_path(drawn, shapes)


def observations(env: Talk, rows: int = 5) -> Any:
    return jax.tree.map(np.asarray, jax.vmap(env.reset)(jax.random.split(jax.random.key(3), rows))[1])


@pytest.fixture(scope="module", params=POLICIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each policy in every format that can be written here."""
    return export(request.param, tmp_path_factory.getbasetemp())


@functools.cache
def export(name: str, folder: Path) -> Path:
    if not HERE:
        pytest.skip("no format can be written here: pip install 'ejax[torch,onnx]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interop.artefacts.parity.BATCH_SIZES", (1,))  # StableHLO is compiled for each size
        patch.setattr("interop.artefacts.cases._IMAGE_BYTES", 32 * 9 * 8 * 3)
        patch.setattr("interop.artefacts.adversaries._NUM_ROWS_WITH_IMAGES", 32)
        patch.setattr("interop.artefacts.vla_cases._NUM_ROWS", 32)
        env, (policy, params) = ENVS.get(name, Talk()), made(name)
        export_policy(policy, params, env, folder / f"exported-{name}", HERE, origin=ORIGIN)
    return folder / f"exported-{name}"


@pytest.fixture(scope="module")
def keypoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("keypoints", tmp_path_factory.getbasetemp())


def certificate(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "parity.json").read_text())


def test_every_format_answers_as_jax_does_with_adapters_beside_the_weights(exported: Path) -> None:
    report = certificate(exported)
    cases = {"environment", "edges", "zeros", "huge", "not_a_number", "noise", "texts"}
    flow = load_spec(exported / "policy.json").head == "flow"
    assert set(report["rows"]) == cases | ({"sampled"} if flow else set())
    assert list(report["artefacts"]) == HERE
    assert report["clipping"] == "to the action space, as the environment does"
    for facts in report["artefacts"].values():
        assert 0.0 <= facts["of_allowed"] <= 1.0
        assert facts["cases"]["environment"]["action"]["max_abs"] < 1e-5
    assert verify(exported, trust=True).keys() == set(HERE)


def test_a_policy_of_other_adapters_is_a_mismatch(keypoints: Path) -> None:
    """The certificate's answers are those with adapters: without them, or with half of them, they are others."""
    policy, params = made("keypoints")
    case = next(case for case in load_cases(keypoints / "observations.npz") if case.name == "sampled")
    obs = {name: jnp.asarray(case.observation[name]) for name in ("image", "state")}
    said = jnp.asarray(SAID[np.arange(len(obs["state"])) % 3])
    del said
    tokens = dataclasses.replace(policy, words=_Given(policy.words.vocabulary, policy.words.max_words))

    @jax.jit
    def answer(params: Params) -> jax.Array:
        given = {**obs, "instruction": jnp.asarray(case.observation["tokens"])}
        return tokens.apply(params, given)[0].from_noise(jnp.asarray(case.observation["noise"]))

    def scaled(share: float) -> Params:
        kept = lambda path, x: share * x if path[-1].key == "lora_b" else x  # noqa: E731
        return jax.tree_util.tree_map_with_path(kept, params)

    for share, passes in ((1.0, True), (0.0, False), (0.5, False)):
        error = np.abs(answer(scaled(share)) - case.expected["unclipped"])
        assert (error <= case.allowed["unclipped"]).all() == passes
