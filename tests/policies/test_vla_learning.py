"""Learning on pi0 and SmolVLA: from nothing, with adapters and frozen parts; their folders for LeRobot."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from flax import traverse_util
from golden_pairs import load as load_golden
from golden_vla_models import FILE, KINDS, small, write_folder
from picture_task import CHUNK, TEXTS, PictureTask

from ejax.config import parse_config
from ejax.config.data import DataConfig
from ejax.numerics.text import as_bytes, as_text
from ejax.policies.vla.config import VLAConfig
from ejax.policies.vla.lerobot_policy import LeRobotPolicy, make_of
from ejax.policies.vla.words import PADDING, Words, vocabulary_of
from ejax.run import train
from ejax.schema.trust import trust
from ejax.store.checkpoint import load_params
from ejax.training.environments import sample_obs
from ejax.training.fields import read_observation
from ejax.types import Params

SIZES = {"picture": 16, "patch": 8, "vision_width": 16, "vision_depth": 1, "width": 16, "expert_width": 16, "depth": 1}
MODEL = {"images": ["image"], "sizes": {**SIZES, "head_size": 4}, "head": {"num_steps": 2}}
ENV = PictureTask()


def make(**model: Any) -> LeRobotPolicy:
    section = {"inference_horizon": CHUNK, "model_config": {**MODEL, **model}}
    config = VLAConfig.model_validate_json(json.dumps(section))
    return make_of("pi0", config, ENV.action_space, ENV.observation_space, TEXTS)


def observations(rows: int = 2) -> dict[str, Any]:
    draw, obs = np.random.default_rng(0), dict(sample_obs(ENV, rows))
    obs["image"] = draw.integers(0, 256, obs["image"].shape, np.uint8)
    obs["state"] = draw.normal(size=obs["state"].shape).astype(np.float32)
    obs["instruction"] = np.stack([as_bytes(TEXTS[i % 2], 64) for i in range(rows)])
    return obs


@cache
def started(**model: Any) -> tuple[LeRobotPolicy, Params]:
    policy = make(**{name: json.loads(value) for name, value in model.items()})
    return policy, jax.jit(policy.init)(jax.random.key(0), observations(1))


def moved(params: Params) -> Params:
    """Change all that is trained: B of an adapter is zero at first."""
    return {**params, "params": jax.tree.map(lambda x: x + 0.1, params["params"])}


ADAPTED = {"lora": '{"rank": 2, "modules": ["expert.*[.][qv]$", "action_in"]}', "frozen": '["vision", "words"]'}


def test_adapters_and_frozen_parts_are_those_that_are_named() -> None:
    _, params = started(**ADAPTED)
    names = {part: {".".join(path) for path in traverse_util.flatten_dict(params[part])} for part in ("params", "kept")}
    assert "words.embedding" in names["kept"] and "expert.layers_0.q.kernel" in names["kept"]
    assert {name.partition(".")[0] for name in names["kept"]} == {"vision", "words", "expert", "action_in"}
    adapters = {name.removesuffix(".lora_a") for name in names["params"] if name.endswith("lora_a")}
    assert adapters == {"expert.layers_0.q", "expert.layers_0.v", "action_in"}
    assert "expert.layers_0.o.kernel" in names["params"] and "vision.layers_0.q.kernel" not in names["params"]
    everything = {name for name in names["params"] | names["kept"] if "lora" not in name}
    plain = {".".join(path) for path in traverse_util.flatten_dict(started()[1]["params"])}
    assert everything == plain
    _, params = started(lora='{"rank": 2}')  # all linear layers, and nothing else
    assert {path[-1] for path in traverse_util.flatten_dict(params["params"])} == {"lora_a", "lora_b"}


def test_merged_weights_act_as_adapters_do() -> None:
    policy, params = started(**ADAPTED)
    plain, obs = replace(policy, lora=None, frozen=None), observations()
    act = jax.jit(lambda policy, params: policy.apply(params, obs)[0].mode(), static_argnums=0)
    before = act(policy, params)
    np.testing.assert_allclose(act(plain, policy.merge(params)), before, atol=1e-5)
    after = act(policy, moved(params))
    assert not np.allclose(after, before, atol=1e-3)
    np.testing.assert_allclose(act(plain, policy.merge(moved(params))), after, atol=1e-4)
    again = policy.adopt(policy.merge(params), params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_decision_has_the_density_that_a_rollout_stored() -> None:
    """PPO's and GRPO's ratio is one before the first step."""
    policy, params = started(**ADAPTED)

    @jax.jit
    def both(params: Params) -> Any:
        distribution = policy.apply(params, observations())[0]
        decision = distribution.sample(jax.random.key(1))
        return distribution.for_storage(decision).log_prob(decision), distribution.log_prob(decision)

    stored, now = both(params)
    np.testing.assert_array_equal(stored, now)
    assert np.isfinite(now).all()


def test_units_are_those_of_the_first_demonstrations() -> None:
    policy, params = started()
    draw = np.random.default_rng(0)
    obs = {"state": draw.normal(3.0, 2.0, (5, 4, 2)).astype(np.float32)}
    action = np.concatenate([draw.normal(-1.0, 0.1, (5, 4, 1)), np.full((5, 4, 1), 7.0)], axis=-1).astype(np.float32)
    units = policy.fit_units(params, obs, jnp.asarray(action))["frozen"]
    for name, x in (("state", obs["state"]), ("action", action)):
        np.testing.assert_allclose(units[f"{name}_shift"], x.reshape(-1, 2).mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(units["state_scale"], obs["state"].reshape(-1, 2).std(axis=0), rtol=1e-5)
    assert float(units["action_scale"][1]) == 1.0  # it never varies
    assert replace(policy, fits=False).fit_units(params, obs, jnp.asarray(action)) is params


@cases(
    "model text",
    ({"frozen": ["visio$"]}, "no weight's name begins with 'visio"),
    ({"lora": {"modules": ["[q"]}}, "not a regular expression"),
    ({"sizes": {**SIZES, "vision_width": 24}}, "vision_width is 24; pi0's vision tower has 16 heads"),
    ({"sizes": {**SIZES, "patch": 5}}, "let the first divide the second"),
    ({"sizes": {**SIZES, "max_words": 1}}, "an instruction of 2 words"),
)
def test_options_that_do_not_fit_are_refused(model: Any, text: str) -> None:
    refused(make, **model, match=text)


def test_an_exported_tokenizer_gives_the_same_tokens() -> None:
    from tokenizers import Tokenizer

    from interop.exporters.lerobot import tokenizer_json

    words = Words(vocabulary_of([*TEXTS, "é 12cube"]), max_words=8)
    read = Tokenizer.from_str(tokenizer_json(words))
    for text in (*TEXTS, "Go LEFT, é 12CUBE!\n", "an unknown É word", "", "-"):
        wanted = words.encode(text)
        assert read.encode(text).ids == wanted[wanted != PADDING].tolist(), text


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_written_as_lerobot_names_and_lays_them_out(kind: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    from interop.exporters.lerobot import lerobot_weights

    folder = write_folder(tmp_path / kind, kind)
    written, given = lerobot_weights(*small(kind, folder)), load_file(folder / "model.safetensors")
    assert written.keys() == given.keys() == json.loads(str(load_golden(FILE)[f"{kind}/shapes"])).keys()
    tied = "model.paligemma_with_expert.paligemma.lm_head.weight"
    for name, x in given.items():
        np.testing.assert_array_equal(written[name], x if name != tied else written[name], name)


def test_a_folder_for_lerobot_acts_as_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra pretrained")
    from ejax.policies.vla.lerobot_policy import open_folder
    from interop.exporters.lerobot import export_lerobot

    policy, params = started(**ADAPTED)
    params = moved(params)
    params["frozen"] = {**params["frozen"], "action_scale": jnp.full(2, 3.0), "state_shift": jnp.full(2, 0.5)}
    export_lerobot(policy, params, ENV, tmp_path / "files")
    read, again, spaces = open_folder(tmp_path / "files")
    given = np.load(tmp_path / "files" / "observations.npz")
    obs = {name: jnp.asarray(given[name]) for name in spaces}
    obs["prompt"] = jnp.asarray(np.stack([as_bytes(str(text), 64) for text in given["task"]]))
    chunk = jax.jit(lambda params, obs: read.apply(params, obs)[0].mode())(again, obs)
    np.testing.assert_allclose(chunk, given["action"], atol=1e-4)
    refused(export_lerobot, policy, params, ENV, tmp_path / "files", match="choose a new folder", error=FileExistsError)


def test_an_episodes_task_is_the_instruction_of_its_frames() -> None:
    parts = {"state": "observation/state", "instruction": "episode/instruction"}
    data = DataConfig(source="recorded", folder="demos", obs_parts=parts)
    state = np.zeros((2, 3, 2), np.float32)
    fields = {"observation": {"state": state}, "valid": np.ones((2, 3), bool)}
    fields["episode"] = {"instruction": np.array(TEXTS)}
    expected = {"state": np.zeros((1, 2), np.float32), "instruction": np.zeros((1, 64), np.uint8)}
    read = read_observation(fields, expected, data, "data")["instruction"]
    assert read.shape == (2, 3, 64) and read.dtype == np.uint8
    assert [as_text(read[i, 2]) for i in range(2)] == list(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_adapters_train_and_a_cut_run_goes_on_with_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    import shutil

    task = "tests.helpers.picture_task:PictureTask"
    trust(task)
    own = {"critic": True} if algorithm == "ppo" else {}
    cfg = {"batch_size": 8, "n_epochs": 1, "kl_coef": 0.1, "optimizer": {"ema_decay": 0.9}}
    trainer = {"exp_name": "pi0", "num_envs": 4, "buffer_size": 4, "iterations": 2, "updates_per_dispatch": 1}
    trainer |= {"console": False, "output_dir": str(tmp_path), "save_frequency_updates": 1, "keep_checkpoints": 9}
    model = {**MODEL, **own, "lora": {"rank": 2, "modules": ["expert"]}, "frozen": ["vision"]}
    config = parse_config(
        {
            "env": {"id": task},
            "trainer": trainer,
            "policy": {"name": "pi0", "vla_config": {"inference_horizon": CHUNK, "model_config": model}},
            "algorithm": {"name": algorithm, "cfg": cfg | ({"group_size": 2} if algorithm == "grpo" else {})},
        }
    )
    whole = train(config, run_dir=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "pi0_step_32")
    again = train(config, resume="latest", run_dir=tmp_path / "cut")
    assert whole.finished and again.finished
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
    assert again.latest_checkpoint_path is not None
    kept = load_params(again.latest_checkpoint_path, again.params)  # the average, which is what acts
    jax.tree.map(np.testing.assert_array_equal, kept, again.params)
    first = make(**{**model, **own}).init(jax.random.key(0), observations(1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again.params))
    assert jax.tree.structure(first["params"]) == jax.tree.structure(again.params["params"])
