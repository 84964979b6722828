"""Image policies in torch: the same weights and answers, in every format; a deployed one asks for what it reads."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import chex
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from exports import HERE, ROOT, case_of, certificate, contract_of, needs, one_batch_size, save_run, skip_without_formats

from ejax.config import load_config, parse_config
from ejax.distributions import action_spec
from ejax.envs.host.pure_host import PureHostEnv
from ejax.optim import OptimizerConfig, make_optimizer
from ejax.policies import NetworkConfig
from ejax.policies.vision import VisionPolicy
from ejax.training.environments import build_env
from ejax.training.policies import make_policy
from ejax.types import Timestep
from interop.artefacts.cases import observe_env, steps_to_observe
from interop.artefacts.formats import FORMATS
from interop.checkpoints.optimizer_state import opt_state_from_torch, torch_optimizer_state
from interop.checkpoints.weights import params_from_state_dict, state_dict_from_params, tensors
from interop.export import export_policy, export_run
from interop.exporters.record import spec_of
from interop.twin.kinds import load_spec, spec_from_json, spec_to_json

needs_torch = needs("pt")
HIDDEN = (0, 1, 3)
"""Entries of ``Scene``: the whole cube, and the second joint."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """Joints, a cube and pictures of the cube by two cameras, drawn by JAX: cheap."""

    shapes: tuple[tuple[str, tuple[int, int, int]], ...] = (("image", (16, 20, 3)),)
    numbers: bool = True
    max_episode_steps: int = 10
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        parts: dict[str, Any] = {name: gymnasium.spaces.Box(0, 255, shape, np.uint8) for name, shape in self.shapes}
        on_robot = {name.removeprefix("robot."): parts.pop(name) for name in list(parts) if name.startswith("robot.")}
        if self.numbers:
            joints = {"q": gymnasium.spaces.Box(-9, 9, (2,)), "v": gymnasium.spaces.Box(-np.inf, np.inf, (3,))}
            parts |= {"cube": gymnasium.spaces.Box(-9, 9, (2,)), "robot": gymnasium.spaces.Dict(joints | on_robot)}
        return gymnasium.spaces.Dict(parts)

    def reset(self, key: jax.Array) -> tuple[Any, Any]:
        x = jax.random.uniform(key, (7,), minval=-1.0)
        return x, self._observe(x)

    def step(self, state: Any, action: jax.Array, key: jax.Array) -> tuple[Any, Timestep]:
        del key  # starts and actions vary enough
        state = jnp.clip(state + 0.1 * jnp.pad(jnp.clip(action, -1.0, 1.0), (0, 3)), -9.0, 9.0)
        never = jnp.bool_(False)
        obs = self._observe(state)
        return state, Timestep(obs=obs, reward=state.sum(), terminated=never, truncated=never, info={})

    def _observe(self, x: jax.Array) -> Any:
        obs: dict[str, Any] = {name: self._draw(x[i : i + 2], shape) for i, (name, shape) in enumerate(self.shapes)}
        on_robot = {name.removeprefix("robot."): obs.pop(name) for name in list(obs) if name.startswith("robot.")}
        if self.numbers:
            obs |= {"cube": x[:2], "robot": {"q": x[2:4], "v": x[4:], **on_robot}}
        return obs

    @staticmethod
    def _draw(place: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
        """Draw a coloured spot on a shaded floor."""
        row, column = jnp.linspace(-1.0, 1.0, shape[0])[:, None], jnp.linspace(-1.0, 1.0, shape[1])[None, :]
        spot = jnp.exp(-8.0 * ((row - place[0]) ** 2 + (column - place[1]) ** 2))
        light = 90.0 + 40.0 * row + spot
        colours = jnp.array([160.0, 90.0, -60.0])[: shape[2]]
        return jnp.clip(light[..., None] + spot[..., None] * colours[None, None], 0.0, 255.0).astype(jnp.uint8)


TWO = Scene(shapes=(("image", (16, 20, 3)), ("wrist", (9, 11, 3))))
POLICIES: dict[str, tuple[Scene, dict[str, Any]]] = {
    "odd": (Scene(shapes=(("image", (17, 23, 3)),)), {}),
    "tiny": (Scene(shapes=(("image", (3, 1, 3)),)), {"hidden_entries": HIDDEN}),
    "two": (
        TWO,
        {
            "images": ("wrist", "image"),
            "hidden_entries": HIDDEN,
            "actor_obs_normalization": True,
            "critic": True,
            "network": {"use_layernorm": True, "dropout_p": 0.1},
        },
    ),
    "alone": (Scene(numbers=False), {"critic": True}),
    "nested": (
        Scene(shapes=(("robot.cam", (9, 11, 3)),)),
        {"images": ("robot.cam",), "actor_obs_normalization": True, "hidden_entries": HIDDEN},
    ),
}


def make(env: Any, *, weight: float = 0.4, **options: Any) -> tuple[VisionPolicy, Any]:
    """Make a policy with random weights and a used normalizer."""
    network = NetworkConfig(hidden_sizes=(16, 8), activation="tanh", **options.pop("network", {}))
    critic = NetworkConfig(hidden_sizes=(8,)) if options.pop("critic", False) else None
    options = {"action_spec": action_spec(env.action_space), "channels": (4, 6, 5), **options}
    policy = VisionPolicy(actor=network, critic=critic, **options)
    return policy, random_params(policy, env, weight)


def random_params(policy: VisionPolicy, env: Any, weight: float = 0.4) -> Any:
    obs = jax.eval_shape(lambda: env.reset(jax.random.key(0))[1])
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(policy.init, jax.random.key(0), obs)
    params = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-weight, weight, x.shape), x.dtype), shapes)
    for statistics in params.get("normalizer", {}).values():
        statistics |= {"variance": statistics["variance"] + weight + 0.1, "count": jnp.float32(100.0)}
    return params


@functools.cache
def made(name: str) -> tuple[VisionPolicy, Any]:
    """Make one of ``POLICIES``."""
    env, options = POLICIES[name]
    return make(env, **options)


def observations(env: Any, rows: int = 6) -> Any:
    return jax.vmap(env.reset)(jax.random.split(jax.random.key(3), rows))[1]


def assert_same(a: Any, b: Any) -> None:
    chex.assert_trees_all_equal(a, b, strict=True)


@pytest.mark.parametrize("name", POLICIES)
def test_weights_there_and_back_are_the_same_bits(name: str) -> None:
    policy, params = made(name)
    assert_same(params_from_state_dict(policy, state_dict_from_params(policy, params)), params)


def test_keys_shapes_and_order_are_those_of_torch() -> None:
    policy, params = make(Scene(), critic=True)
    shapes = [(key, x.shape) for key, x in state_dict_from_params(policy, params).items()]
    assert shapes[:8] == [
        ("log_std", (4,)),
        ("encoder_image.0.weight", (4, 3, 4, 4)),
        ("encoder_image.0.bias", (4,)),
        ("encoder_image.1.weight", (6, 4, 3, 3)),
        ("encoder_image.1.bias", (6,)),
        ("encoder_image.2.weight", (5, 6, 3, 3)),
        ("encoder_image.2.bias", (5,)),
        ("actor.0.weight", (16, 10 + 7)),
    ]
    assert next(key for key, _ in shapes if key.startswith("critic")) == "critic.0.weight"


@cases(
    "key wrong message",
    ("encoder_image.1.weight", np.zeros((6, 5, 3, 3)), r"needs float32\[6, 4, 3, 3\]"),
    ("encoder_image.0.weight", None, r"lacks encoder_image\.0\.weight"),
    ("encoder_lamp.0.bias", np.zeros(4), r"has encoder_lamp\.0\.bias, which the policy lacks"),
)
def test_weights_that_do_not_fit_are_named(key: str, wrong: Any, message: str) -> None:
    policy, params = made("two")
    changes = {} if wrong is None else {key: np.asarray(wrong, np.float32)}
    kept = {name: x for name, x in state_dict_from_params(policy, params).items() if name != key}
    refused(params_from_state_dict, policy, kept | changes, match=message)


def test_adams_state_there_and_back_is_the_same_bits() -> None:
    policy, params = made("two")
    config = OptimizerConfig(name="adam", learning_rate=1e-3)
    optimizer = make_optimizer(config)
    rng = np.random.default_rng(2)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params["params"])

    start = optimizer.init(params["params"])
    _, state = jax.jit(optimizer.update)(gradient, start, params["params"])
    moved = torch_optimizer_state(policy, state, config)
    assert moved["state"][1]["exp_avg"].shape == (4, 3, 4, 4)
    assert_same(opt_state_from_torch(policy, params, moved, config), state)


@needs_torch
def test_torch_numbers_the_parameters_as_adams_state_does() -> None:
    from interop.policy import make_policy

    policy, params = made("two")
    twin = make_policy(spec_of(policy, TWO), state_dict_from_params(policy, params))
    assert [name for name, _ in twin.named_parameters()] == [entry.key for entry in tensors(policy) if entry.trained]


@needs_torch
@pytest.mark.parametrize("name", POLICIES)
def test_the_twin_answers_as_jax(name: str) -> None:
    import torch

    from interop.policy import make_policy

    env = POLICIES[name][0]
    policy, params = made(name)
    obs = observations(env)
    spec = spec_from_json(spec_to_json(spec_of(policy, env)))  # what survives a file
    twin = make_policy(spec, state_dict_from_params(policy, params))

    @jax.jit
    def answer(params: Any, obs: Any) -> Any:
        distribution, value = policy.apply(params, obs)
        mean = distribution.mean
        return {"action": mean, "value": value, "sample_log_prob": distribution.log_prob(mean)}, distribution.entropy()

    answers, entropy = answer(params, obs)
    td: Any = {"obs": jax.tree.map(lambda x: torch.tensor(np.asarray(x)), obs)}
    twin.get_action(td, deterministic=True)
    for part, y in answers.items():
        np.testing.assert_allclose(td[part].numpy(), y, rtol=1e-5, atol=1e-5, err_msg=part)
    again = twin.evaluate_actions(td)
    np.testing.assert_allclose(again["entropy"].detach().numpy(), entropy, rtol=1e-5)
    np.testing.assert_allclose(again["value"].detach().numpy(), answers["value"], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def twin() -> Any:
    """Make a twin with hidden entries, two cameras and a normalizer."""
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[torch]'")
    from interop.policy import make_policy

    policy, params = made("two")
    return make_policy(spec_of(policy, TWO), state_dict_from_params(policy, params))


def test_the_actor_acts_without_what_is_hidden_from_it(twin: Any) -> None:
    obs = jax.tree.map(np.asarray, observations(TWO))
    alone = {"image": obs["image"], "wrist": obs["wrist"], "robot": {**obs["robot"], "q": obs["robot"]["q"][:, :1]}}
    expected = twin.act(obs)
    np.testing.assert_allclose(twin.act(alone), expected, rtol=1e-5, atol=1e-6)
    moved = {**obs, "cube": obs["cube"] + 1.0}
    np.testing.assert_array_equal(twin.act(moved), expected)
    assert (twin.value(moved) != twin.value(obs)).all()  # the critic knows
    one = jax.tree.map(lambda x: x[0], obs)
    np.testing.assert_allclose(twin.act(one), expected[0], rtol=1e-5, atol=1e-6)


def test_an_image_that_is_no_bytes_is_not_exported() -> None:
    class Floats(Scene):
        def reset(self, key: jax.Array) -> tuple[Any, Any]:
            state, obs = super().reset(key)
            return state, {**obs, "image": obs["image"].astype(jnp.float32)}

    policy, _ = make(Scene())
    refused(spec_of, policy, Floats(), word="'image' is float32[16, 20, 3]; an export takes uint8")


ENV = Scene(shapes=(("image", (10, 13, 3)),))
EXPORTED = {"hidden_entries": HIDDEN, "actor_obs_normalization": True, "critic": True}
ORIGIN = {"checkpoint": "none", "global_step": 0, "env": {"id": "Scene", "cfg": {}}}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export every format that can be written here."""
    skip_without_formats()
    policy, params = make(ENV, **EXPORTED)
    directory = tmp_path_factory.mktemp("vision") / "exported"
    with pytest.MonkeyPatch.context() as patch:
        one_batch_size(patch)
        patch.setattr("interop.artefacts.cases._IMAGE_BYTES", 64 * 10 * 13 * 3)
        export_policy(policy, params, ENV, directory, HERE, origin=ORIGIN)
    return directory


@pytest.mark.slow
def test_every_format_answers_as_jax(exported: Path) -> None:
    report = certificate(exported)
    rows = {"environment": 64, "edges": 64, "zeros": 1, "huge": 64, "not_a_number": 64, "noise": 64}
    assert report["rows"] == rows
    assert report["clipping"] == "to the action space, as the environment does"
    assert list(report["artefacts"]) == HERE
    for facts in report["artefacts"].values():
        assert 0.0 <= facts["of_allowed"] <= 1.0
        assert facts["cases"]["noise"]["mean"]["max_abs"] < 1e-5
    with np.load(exported / "observations.npz") as file:
        images = file["edges/observation/image"]
    assert set(np.unique(images)) == {0, 255}
    assert not images[0].any() and images[1].all()


def test_it_is_checked_on_1024_small_pictures_and_on_fewer_large_ones() -> None:
    for size, rows in ((10, 1024), (64, 1024), (128, 256)):
        env = Scene(shapes=(("image", (size, size, 3)),))
        policy, _ = make(ENV)
        assert 16 * steps_to_observe(spec_of(policy, env), env.observation_space) == rows


@pytest.mark.slow
def test_the_contract_asks_for_what_the_actor_reads_and_no_more(exported: Path) -> None:
    contract = contract_of(exported)
    image, q, v = contract["observation"]
    assert (image["name"], image["dtype"], image["shape"]) == ("image", "uint8", ["batch", 10, 13, 3])
    assert (q["name"], q["shape"], q["entries"]) == ("robot.q", ["batch", 1], [0])
    assert (v["name"], v["shape"], "entries" in v) == ("robot.v", ["batch", 3], False)
    assert (q["low"], q["high"]) == ([-9.0], [9.0])


@pytest.mark.slow
@pytest.mark.parametrize("module", [pytest.param("onnx_policy", marks=needs("onnx")), "policy"])
def test_a_loaded_policy_sees_as_the_contract_or_the_environment_gives_it(module: str, exported: Path) -> None:
    policy = pytest.importorskip(f"interop.{module}").load_policy(exported)
    case = case_of(exported, "environment")
    q, expected = case.observation["robot.q"], case.expected["action"]
    np.testing.assert_allclose(policy.act(case.observation), expected, atol=1e-5)
    whole = {**case.observation, "robot.q": np.concatenate([q, q + 1.0], axis=1).astype(np.float64)}
    np.testing.assert_allclose(policy.act(whole), expected, atol=1e-5)
    np.testing.assert_allclose(policy.act({name: x[0] for name, x in whole.items()}), expected[0], atol=1e-5)
    image = case.observation["image"]
    for change, message in (
        ({"image": image / 255.0}, r"'image' is .*float64 .*uint8 .*do not scale"),
        ({"image": image[:, :7]}, r"\[64, 7, 13, 3\]"),
        ({"image": image.transpose(0, 3, 1, 2)}, r"\[64, 3, 10, 13\]"),
        ({"robot.q": np.zeros((64, 3))}, r"'robot\.q' has 3 numbers, .* made for 2 or, .* does not read, 1"),
        ({"robot.q": q[:5]}, r"of one batch, got image .*, robot\.q \[5, 1\]"),
        ({"robot.v": np.full((64, 3), "0")}, r"'robot\.v' must be .*array of numbers"),
    ):
        refused(policy.act, {**case.observation, **change}, match=message)


@jax.jit
def mean_of(image: jax.Array, q: jax.Array, v: jax.Array) -> jax.Array:
    """Compute the exported policy's mean; the image may be of floats here."""
    policy, params = make(ENV, **EXPORTED)
    robot = {"q": jnp.pad(q, ((0, 0), (0, 1))), "v": v}
    return policy.apply(params, {"image": image, "cube": jnp.zeros((len(q), 2)), "robot": robot})[0].mean


WRONG: dict[str, Any] = {
    "x/128 - 1": lambda x: x * (127.5 / 128.0),
    "blue first": lambda x: x[..., ::-1],
    "shifted": lambda x: np.roll(x, 1, axis=1),
    "one pixel by one": lambda x: x + np.eye(1, x[0].size, 77, dtype=x.dtype).reshape(1, *x.shape[1:]),
    "a hundredth of a grey level": lambda x: x + np.float32(0.01),
    "half precision": lambda x: ((x / 127.5 - 1.0).astype(np.float16).astype(np.float32) + 1.0) * 127.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_what_treats_images_otherwise_is_a_mismatch(exported: Path, wrong: str | None) -> None:
    case = case_of(exported, "environment")
    image, q, v = (x[:64] for x in case.observation.values())
    image = image.astype(np.float32)
    error = np.abs(mean_of(image if wrong is None else WRONG[wrong](image), q, v) - case.expected["mean"][:64])
    assert (error <= case.allowed["mean"][:64]).all() == (wrong is None)


@pytest.mark.slow
@needs("torchscript")
def test_a_trace_refuses_a_wrong_image_too(exported: Path) -> None:
    import torch

    run = FORMATS["torchscript"].load(exported / "policy.torchscript", load_spec(exported / "policy.json"))
    leaves = [np.zeros((2, 10, 13, 3), np.float32), np.zeros((2, 1), np.float32), np.zeros((2, 3), np.float32)]
    with pytest.raises(torch.jit.Error, match=r"made for torch\.uint8 with rows, columns and channels \[10, 13, 3\]"):
        run(leaves)


@pytest.mark.slow
def test_an_environment_outside_jax_shows_the_same_images() -> None:
    policy, params = make(ENV)
    seen = observe_env(policy, PureHostEnv(ENV, 4), params, spec_of(policy, ENV))
    assert (seen["image"].shape, seen["image"].dtype) == ((4 * 64, 10, 13, 3), np.uint8)
    assert seen["robot.q"].dtype == np.float32
    assert spec_of(policy, PureHostEnv(ENV, 4)) == spec_of(policy, ENV)


@pytest.mark.slow
def test_a_policy_of_images_alone_ignores_its_normalizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_formats()
    env, _ = POLICIES["alone"]
    policy, params = make(env, actor_obs_normalization=True)
    image = np.asarray(observations(env)["image"])
    monkeypatch.setattr("interop.export.observe_env", lambda *_: {"image": image})
    report = export_policy(policy, params, env, tmp_path / "out", HERE[:1], origin=ORIGIN)
    assert "not_a_number" not in report["rows"]  # there are no numbers


@pytest.mark.slow
def test_a_run_with_drawn_pictures_and_chunks_of_actions_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config is that which clones from pictures, with small ones, and few. Its actions are squashed, so that it
    need not be found out whether the environment clips them; and no episode is played."""
    monkeypatch.setattr("interop.artefacts.cases._IMAGE_BYTES", 128 * 10 * 12 * 3)
    monkeypatch.setattr("interop.export.reference_episode", lambda *_: None)
    skip_without_formats()
    cloning = load_config(ROOT / "configs/push_cube/bc_images.yaml", ["policy.cfg.channels=[4,4,4]"]).to_dict()
    cloning["env"]["wrappers"][1]["RenderedEnv"] |= {"width": 12, "height": 10}
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    trainer = {"exp_name": "seen", "num_envs": 2, "buffer_size": 4, "iterations": 1, "console": False}
    config = parse_config(
        {
            "env": cloning["env"],
            "policy": {**cloning["policy"], "critic": network, "squash_actions": True},
            "trainer": trainer,
            "algorithm": {"name": "ppo", "cfg": {"batch_size": 4}},
        }
    )
    env = build_env(config)
    params = random_params(make_policy(config.policy, env), env)
    save_run(config, tmp_path / "run", {"train": {"params": params}})
    report = export_run(tmp_path / "run", tmp_path / "out", HERE[:1])
    assert report["rows"]["environment"] == 128
    contract = contract_of(tmp_path / "out")
    image, state = contract["observation"]
    assert image["shape"] == ["batch", 10, 12, 3]
    assert (len(state["features"]), state["features"][8]) == (9, {"name": "tool centre point z", "unit": "m"})
    action = contract["action"]
    assert (action["chunk"]["shape"], action["chunk"]["action_rate_hz"]) == ([4, 6], 25.0)
    assert action["features"][23] == {"name": "wrist_3 angle change / action_scale, action 4 of 4", "unit": "rad"}
    assert (contract["control_rate_hz"], contract["env"]["max_episode_steps"]) == (6.25, 25)
    assert contract["env"]["parameters"]["action_scale"] == 0.1
