"""pi0 and SmolVLA: folders of weights, and the policies that they make. For their numbers see ``golden/README.md``."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_tables import cases, refused
from golden_vla_models import GIVEN, KINDS, load, make, small, write_folder
from vla_model_inputs import CHUNK, LENGTH

from ejax.config.embodichain.check import check
from ejax.numerics.text import as_bytes
from ejax.policies.pretrained.weights import WeightsError
from ejax.policies.vla.expert import ExpertNetwork, touch_all
from ejax.policies.vla.lerobot_folder import FULL, affine, folder_kind, tokenizer
from ejax.policies.vla.lerobot_policy import LeRobotPolicy
from interop.serving.policies import load_served


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LeRobotPolicy, Any]:
    folder = write_folder(tmp_path_factory.mktemp("weights") / request.param, request.param)
    return request.param, *small(request.param, folder)


def openpis(name: str) -> str:
    """Spell a name as openpi's conversion and LeRobot's first releases do."""
    return name.removeprefix("model.").replace("paligemma.model.language_model.", "paligemma.language_model.model.")


OTHER_SPELLINGS = {
    "openpi": openpis,
    "the head alone": lambda name: "" if "language_model.embed_tokens" in name else name,
    "older time": lambda name: name.replace("model.action_time_mlp", "time_mlp"),
}


@pytest.mark.parametrize("spelling", OTHER_SPELLINGS)
def test_other_spellings_of_names_load_the_same(spelling: str, tmp_path: Path) -> None:
    renames = {"first": str, "other": OTHER_SPELLINGS[spelling]}
    first, other = (write_folder(tmp_path / name, "pi0", rename) for name, rename in renames.items())
    policy, params = small("pi0", first)
    loaded, _ = load(policy, other)
    words = params["params"]["words"]["embedding"]
    if spelling == "the head alone":  # drawn from another name
        params["params"]["words"]["embedding"] = loaded["params"]["words"]["embedding"]
        assert not np.array_equal(words, loaded["params"]["words"]["embedding"])
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    params["params"]["words"]["embedding"] = words


def test_all_names_that_do_not_fit_are_in_one_error(tmp_path: Path) -> None:
    swapped = {"model.state_proj.bias": "model.state_project.bias", "model.action_out_proj.bias": "spare"}
    folder = write_folder(tmp_path / "odd", "pi0", lambda name: swapped.get(name, name))
    whole = write_folder(tmp_path / "whole", "pi0")
    text = r"2 without an array: action_out\.bias, state_in\.bias; 2 of the file .*place: .*state_project.*spare"
    refused(lambda: load(small("pi0", whole)[0], folder), match=text, error=WeightsError)
    other = write_folder(tmp_path / "other", "pi0", lambda name: name.replace("q_proj", "query"))
    refused(make, "pi0", other, match=r"has no vision\.layers_0\.q\.weight; it is not of pi0", error=WeightsError)


@cases(
    "kind options text",
    ("pi0", {"type": "act"}, "is of 'act', not of pi0"),
    ("pi0", {"use_relative_actions": True}, "use_relative_actions is true, which ejax lacks"),
    ("smolvla", {"add_image_special_tokens": True}, "add_image_special_tokens is true"),
    ("pi0", {"input_features": {"observation.state": {"type": "STATE", "shape": [4]}}}, "has 3 numbers, the model's 4"),
    ("smolvla", {"resize_imgs_with_padding": [32, 32]}, r"ejax has the size of these weights, \[16, 16\]"),
    ("pi0", {"chunk_size": 3}, "at most the model's chunk of 3"),
)
def test_a_folder_that_does_not_fit_is_refused(kind: str, options: Any, text: str, tmp_path: Path) -> None:
    refused(lambda: make(kind, write_folder(tmp_path / kind, kind, **options)), match=text)


@cases(
    "model text",
    ({"width": 64}, "model_config.width belongs to the built-in model, not to pi0"),
    ({"predicts": ["state"]}, "model_config.predicts belongs to the built-in model"),
    ({"head": {"type": "gaussian"}}, "pi0 is a flow of the 3 steps in its config.json"),
    ({"head": {"num_steps": 7}}, "head has flow and num_steps 7; pi0 is a flow of the 3 steps"),
    ({"images": ["front"]}, "the observation has no front; it has instruction, state, top, wrist"),
)
def test_options_that_the_model_has_not_are_refused(model: Any, text: str, tmp_path: Path) -> None:
    refused(lambda: make("pi0", write_folder(tmp_path / "pi0", "pi0"), **model), match=text)


def test_statistics_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pi0", "pi0", normalization_mapping={"STATE": "QUANTILES", "ACTION": "MEAN_STD"})
    with pytest.raises(WeightsError, match="QUANTILES needs the statistics q01 and q99; q01 is missing"):
        load(small("pi0", folder)[0], folder)
    (folder / "policy_preprocessor.json").unlink()
    norm = {name: {"mean": [0.5] * 32, "std": [2.0] * 32} for name in ("state", "actions")}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": norm}))  # openpi's, with room for any robot
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "normalization_mapping": {}}))
    frozen = load(small("pi0", folder)[0], folder)[0]["frozen"]
    assert {name: x.tolist() for name, x in frozen.items() if name.startswith("action")} == {
        "action_shift": [0.5, 0.5],
        "action_scale": [2.0, 2.0],
        "action_offset": [0.0, 0.0],
    }


def test_units_are_those_of_lerobots_modes() -> None:
    stats = {"mean": 1.0, "std": 2.0, "min": -1.0, "max": 3.0, "q01": 0.0, "q99": 4.0, "q10": 1.0, "q90": 1.0}
    x, modes = 2.5, {"MEAN_STD": 0.75, "MIN_MAX": 0.75, "QUANTILES": 0.25, "QUANTILE10": 3e8 - 1.0, "IDENTITY": 2.5}
    for mode, wanted in modes.items():
        units = affine({name: [each] for name, each in stats.items()}, mode, into_model=True)
        shift, scale, offset = (float(each[0]) for each in units.values())
        assert (x - shift) / scale + offset == pytest.approx(wanted, rel=1e-7), mode
        assert (wanted - offset) * scale + shift == pytest.approx(x, rel=1e-7), mode


def test_the_policy_reads_any_sentence_and_gives_the_environment_its_chunk(loaded: Any) -> None:
    kind, policy, params = loaded
    texts = ["put the red cube", "put the red cube\n", "put the green cube", "the cube " * 4]
    obs = {name: jnp.asarray(np.repeat(GIVEN[name][:1], 4, axis=0)) for name in ("top", "wrist", "state")}
    obs["instruction"] = jnp.asarray(np.stack([as_bytes(text, 40) for text in texts]))
    target = jnp.zeros((4, CHUNK, 2))

    @jax.jit
    def use(params: Any, obs: Any) -> dict[str, Any]:
        (distribution, value), changed = policy.apply(params, obs, mutable=["x"])
        assert changed == {}
        decision = distribution.sample(jax.random.key(0))
        return {
            "chunk": distribution.mode(),
            "value": value,
            "action": distribution.env_action(decision),
            "log_prob": distribution.log_prob(decision),
            "loss": distribution.matching_loss(target, jax.random.key(1)),
        }

    out = use(params, obs)
    chunk = np.asarray(out["chunk"])
    assert chunk.shape == (4, CHUNK * 2)
    assert out["value"].tolist() == [0.0] * 4
    assert np.array_equal(chunk[0], chunk[1])  # lerobot puts the line's end there itself
    assert len(np.unique(chunk, axis=0)) == 3
    assert out["action"].shape == (4, CHUNK * 2)
    assert np.isfinite(out["log_prob"]).all()
    assert out["loss"].shape == target.shape
    fixed = replace(policy, text=None, instruction=(3, 4, 5, 6, 7))
    given = {name: x[:1] for name, x in obs.items() if name != "instruction"}
    assert tokenizer(policy.folder, LENGTH)(texts[0])[0].tolist() == [3, 4, 5, 0, 0], kind
    assert jax.jit(lambda *args: fixed.apply(*args)[0].mode())(params, given).shape == (1, CHUNK * 2)


def test_a_folder_is_served_without_an_environment(loaded: Any) -> None:
    kind, policy, _ = loaded
    served = load_served(Path(policy.folder))
    top, state = "observation.images.top", GIVEN["state"][0]
    pictures = {top: GIVEN["top"][0], "observation.images.wrist": GIVEN["wrist"][0]}
    pictures["observation.images.empty"] = np.zeros((8, 8, 3), np.uint8)
    leaves = served.leaves({**pictures, "observation.state": state, "prompt": "put the red cube"})
    action, memory = served.act(leaves, [])
    assert action.shape == (1, CHUNK * 2)
    assert memory == []
    assert served.contract["action"]["chunk"]["shape"] == [CHUNK, 2]
    assert served.contract["model"] == kind
    refused(served.leaves, {**pictures, "observation.state": state}, match="lacks 'prompt'")
    with pytest.raises(ValueError, match="'prompt' must be a text"):
        served.leaves({**pictures, "observation.state": state, "prompt": np.zeros(3)})


def test_a_config_names_a_folder_and_missing_weights_are_found_by_check(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pi0", "pi0")
    assert folder_kind(str(folder)) == "pi0"
    config = {"env": {"id": "PointMassRL"}, "algorithm": {"name": "ppo"}, "policy": {}, "trainer": {"seed": 1}}
    file = tmp_path / "config.json"
    for name, path, found in (("pi0", folder, []), ("vla", folder, []), ("pi0", tmp_path / "none", ["is not a file"])):
        config["policy"] |= {"name": name, "vla_config": {"model_path": str(path), "instruction": "put"}}
        file.write_text(json.dumps(config))
        notes = [note.text for note in check(file) if note.status == "unsupported" and "model_path" in note.key]
        assert len(notes) == len(found), notes
        assert all(text in note for text, note in zip(found, notes, strict=True))


def test_published_sizes() -> None:
    """As the files have them, but for PaliGemma's and Gemma's heads of words, and SmolVLM's."""
    counts = {}
    for kind, spec in FULL.items():
        size, network = spec.patch * spec.side, ExpertNetwork(spec)
        given = {
            "pictures": (jax.ShapeDtypeStruct((1, size, size, 3), jnp.uint8),),
            "token": jax.ShapeDtypeStruct((1, 48), jnp.int32),
            "read": jax.ShapeDtypeStruct((1, 48), jnp.bool_),
            "state": jax.ShapeDtypeStruct((1, spec.state_dim), jnp.float32),
        }
        made = jax.eval_shape(partial(network.init, method=touch_all), jax.random.key(0), given)
        counts[kind] = sum(x.size for x in jax.tree.leaves(made["params"]))
    assert counts == {"pi0": 3_501_372_176 - 257_152 * 1024, "smolvla": 450_046_176 - 49_280 * 960}
