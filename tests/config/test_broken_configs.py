"""Files that no config can be read from, values that no run can have, and the messages about them."""

import copy
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from refusals import keys_of, refusals, refused
from small_configs import BASE, ROOT, make, trainer

from ejax.config import load_config, parse_config
from ejax.config.embodichain.check import check
from ejax.config.files import UnreadableError, read_json, read_yaml
from ejax.schema.messages import MAX_VALUE_CHARS, short_repr, shorten
from ejax.schema.values import MAX_DEPTH

CART_POLE = ROOT / "tests" / "gym_configs" / "cart_pole.json"
BOMB = "[&a [x,x,x,x,x,x,x,x,x], " + ", ".join(
    f"&{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "[&a {k: 1}, " + ", ".join(
    f"&{b} {{<<: [{','.join([f'*{a}'] * 9)}]}}" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def at_line(file: Path, line: int, **about: str) -> None:
    """Check that a file is refused at a line, by the command that checks it too."""
    error = refused(load_config, file, **about)
    assert str(error).startswith(f"{file}:{line}: 1 problem" if line else f"{file}: 1 problem")
    refused(check, file)


# --- files ------------------------------------------------------------------------------------------------


@refusals(
    ("!!int abc", "", "got 'abc', which is not a !!int"),
    ("!!int ''", "", "got '', which is not a !!int"),
    ("!!float abc", "", "got 'abc', which is not a !!float"),
    ("!!bool abc", "", "got 'abc', which is not a !!bool"),
    ("!!map x", "", "expected a mapping node, but found scalar"),
    ("!!str [1]", "", "expected a scalar node, but found sequence"),
    ("!!timestamp 2024-01-01", "", "the tag !!timestamp is not allowed; allowed: !!str"),
    ("!!python/name:os.system ''", "", "the tag !!python/name:os.system is not allowed"),
    ("&a [*a]", "", "an alias stands inside what it is the alias of"),
    ("&a {b: {c: *a}}", "", "an alias stands inside what it is the alias of"),
    ("*nowhere", "", "found undefined alias 'nowhere'"),
    ("[" * 3000, "", "nested deeper than 50"),
    ("9" * 5000, "", "characters) … 999"),
    ("{? [1] : 2}", "", "a key must be text"),
    ("{<<: 1}", "", "<< takes a mapping"),
    ("&a {b: {<<: *a}}", "", "<< takes a mapping from elsewhere"),
    ('"\\UFFFFFFFF"', "", "an escape means no character"),
    ("a\x07b", "", r"the character '\x07' is not allowed"),
)
def test_yaml_that_means_nothing_is_refused_with_its_line(tmp_path: Path, given: str, key: str, word: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"trainer:\n  num_envs: 8\n  seed: {given}\n")
    at_line(file, 3, key=key, word=word)


@refusals(
    (BOMB + "]", "", "has more than 10000 keys and values"),
    (f"{{text: &t {'x' * 5000}, list: [{'*t, ' * 300}]}}", "", "or as much text"),
    ("[" * 60 + "]" * 60, "trainer.seed.0.0", "nested deeper than 50"),
    ("0x" + "f" * 5000, "trainer.seed", "an integer of more than 100 digits"),
    ("0o" + "7" * 5000, "trainer.seed", "an integer of more than 100 digits"),
)
def test_yaml_that_stands_for_too_much_is_refused_soon(tmp_path: Path, given: str, key: str, word: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"trainer:\n  num_envs: 8\n  seed: {given}\n")
    started = time.process_time()
    refused(load_config, file, key=key, word=word)
    assert time.process_time() - started < 5.0
    refused(check, file)


def test_merges_of_merges_stay_as_small_as_their_file() -> None:
    assert read_yaml(MERGE_BOMB + "]")[-1] == {"k": 1}


@refusals(
    ('"a', "", "Invalid control character"),
    ("9" * 5000, "", "an integer of more than 100 digits"),
    ("9" * 500, "trainer.seed", "an integer of more than 100 digits"),
    ("[" * 100_000, "", "nested deeper than 50"),
    ('{"a":' * 100 + "1" + "}" * 100, "trainer.seed.a.a", "nested deeper than 50"),
    (json.dumps([0] * 20_000), "", "has more than 10000 keys and values"),
)
def test_json_that_means_nothing_is_refused(tmp_path: Path, given: str, key: str, word: str) -> None:
    file = tmp_path / "train.json"
    file.write_text(f'{{"trainer": {{\n"num_envs": 8,\n"seed": {given}\n}}}}')
    at_line(file, 3 if "control" in word else 0, key=key, word=word)


@pytest.mark.parametrize(("name", "size"), [("a.yaml", 10_000_000), ("a.json", 10_000_000)])
def test_a_file_of_10_mb_is_not_parsed(tmp_path: Path, name: str, size: int) -> None:
    (tmp_path / name).write_text('{"trainer": "' + "x" * size + '"}')
    started = time.process_time()
    assert "at most" in str(refused(load_config, tmp_path / name))
    assert time.process_time() - started < 2.0


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "no regular file" in str(refused(load_config, tmp_path / "pipe.yaml"))
    assert "File name too long" in str(refused(load_config, tmp_path / f"{'x' * 300}.yaml"))
    refused(load_config, "a\x00b.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"trainer:\n  exp_name: \xe9\n")
    assert "latin.yaml:2" in str(refused(load_config, tmp_path / "latin.yaml"))


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 100] * 60)])
def test_a_gym_config_under_a_name_that_no_file_has_is_not_there(name: str) -> None:
    assert "there is no" in str(refused(make, trainer={"gym_config": name}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            ("010", 10),
            ("-08", -8),
            ("0o10", 8),
            ("1e3", 1000.0),
            ("1E-3", 0.001),
            (".5", 0.5),
            ("5.", 5.0),
            ("1.10", 1.1),
        ),
        *(
            (text, text)
            for text in ("1:30", "1_000", "0b1", "1e", "inf", "yes", "Off", "12:30:45", "1.10.0", "2024-01-01")
        ),
        *((f"{quote}{text}{quote}", text) for quote in "'\"" for text in ("12e3", "0042", "null", "true", "1.10", "")),
        *(("True", True), ("~", None), ("NULL", None), ("-.Inf", -math.inf)),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    assert (read_yaml(text), type(read_yaml(text))) == (value, type(value))


def test_yaml_gives_what_json_can_hold() -> None:
    text = "{a: 2024-01-01, 1: x, on: y, b: &b [1, 2], c: *b, d: {<<: {e: 1, f: 2}, e: 3}, g: =, h: 0x10, i: 1_0}"
    read = read_yaml(text)
    assert json.loads(json.dumps(read)) == read
    assert read["a"] == "2024-01-01"
    assert (read["1"], read["on"], read["g"], read["h"], read["i"]) == ("x", "y", "=", 16, "1_0")
    assert read["d"] == {"e": 3, "f": 2}
    assert read["b"] == read["c"] == [1, 2]
    assert read["b"] is not read["c"]  # changing one section changes no other


def test_of_several_merged_mappings_the_first_wins() -> None:
    assert read_yaml("{<<: [{a: 1}, {a: 2, b: 2}], c: 3}") == {"a": 1, "b": 2, "c": 3}


def test_nesting_is_counted_through_aliases() -> None:
    step = "[" * 20, "]" * 20
    text = f"[&a {step[0]}1{step[1]}, &b {step[0]}*a{step[1]}, &c {step[0]}*b{step[1]}]"
    with pytest.raises(UnreadableError, match="nested deeper"):
        read_yaml(text)
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert read_yaml(deep) == read_json(deep)


# --- overrides and configs in memory ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "trainer.seed=!!int abc",
        "trainer.seed=&a [*a]",
        "trainer.seed=" + "[" * 5000,
        "trainer.seed=" + "9" * 5000,
        "trainer.seed=a\x1bb",
        'trainer.output_dir="a\\0b"',
        "a." * 3000 + "b=1",
        "trainer.seed=" + "x" * 10**6,
        "trainer=5",
        f"trainer.seed={BOMB}]",
        'trainer.exp_name="\\ud800"',
        "trainer.exp_name=" + "x" * 300,
        "trainer.a\x00=1",
    ],
)
def test_an_override_that_means_nothing_is_refused_in_short(override: str) -> None:
    error = refused(make, override)
    assert all(len(text) < 2500 for _, text in error.problems)


def test_a_config_in_memory_that_holds_itself_is_refused() -> None:
    data = copy.deepcopy(BASE)
    data["trainer"]["events"] = data
    assert "nested deeper" in str(refused(parse_config, data))
    assert "integer of more than" in str(refused(make, trainer=trainer(seed=10**5000)))


def test_long_and_odd_texts_are_cut_and_escaped() -> None:
    assert len(short_repr("x" * 10**6)) <= MAX_VALUE_CHARS
    assert shorten("a" * 500 + "end", 100).startswith("aaa")
    assert shorten("a" * 500 + "end", 100).endswith("end")
    assert "(503 characters)" in shorten("a" * 500 + "end", 100)
    assert shorten("\x1b[31m \ud800") == "\\x1b[31m \\ud800"
    error = refused(make, trainer=trainer(**{f"key{i}": i for i in range(2000)}))
    assert len(error.problems) == 2000
    assert "more" in str(error).splitlines()[-1]


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    [
        "policy.actor.network_cfg.orthogonal_init=.nan",
        "policy.actor.network_cfg.orthogonal_init=[1.0, .inf, 1.0]",
        "env.cfg.success_threshold=.inf",
        "env.cfg.success_bonus=.nan",
        "env.cfg.mass=1.0e+39",
        "env.cfg.dt=-.inf",
        "env.cfg.success_bonus=4294967296",
        "env.cfg.success_threshold=3000000000",
        "env.cfg.max_episode_steps=2147483648",
        "trainer.updates_per_dispatch=2147483648",
        "trainer.num_envs=1.0e+12",
        "trainer.iterations=1.0e+12",
        "trainer.keep_checkpoints=4294967296",
        "algorithm.cfg.max_grad_norm=.nan",
        "algorithm.cfg.ent_coef=.inf",
        "algorithm.cfg.n_epochs=2147483648",
        "algorithm.cfg.optimizer.kwargs={betas: [.nan, 0.9]}",
        "algorithm.cfg.max_grad_norm=-.inf",
        "trainer.collector.env_timeout_s=1.0e+30",
    ],
)
def test_numbers_that_no_array_holds_are_refused_by_their_key(override: str) -> None:
    key = override.partition("=")[0]
    assert all(each.startswith(key) for each in keys_of(refused(make, override)))
    assert all(each.startswith(key) for each in keys_of(refused(make, override, "trainer.seed=3")))


def test_counts_that_do_not_fit_together_are_refused() -> None:
    assert "at most 2147483647 are counted" in str(refused(make, "trainer.total_timesteps=1000000000000000"))
    assert "at most 2147483647 are counted" in str(
        refused(make, "trainer.buffer_size=2000000000", "trainer.num_envs=2")
    )
    kwargs = "algorithm.cfg.lr_scheduler={name: linear, kwargs: {total_iters: 100000000000}}"
    assert keys_of(refused(make, kwargs)) == ["algorithm.cfg.lr_scheduler.kwargs.total_iters"]


def test_what_is_counted_on_the_host_may_be_large() -> None:
    config = make("trainer.total_timesteps=10000000000", "trainer.save_freq=10000000000", "trainer.seed=4294967295")
    assert config.trainer.total_timesteps == 10**10
    assert parse_config(config.to_dict()) == config


def test_a_wrong_number_does_not_hide_other_problems() -> None:
    error = refused(make, "env.cfg.dt=.nan", "trainer.sed=1", "env.cfg.mas=1")  # the environment is not asked by then
    assert keys_of(error) == ["env.cfg.dt (override)", "trainer.sed (override)"]


# --- round trips ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        *((name, ["algorithm.cfg.max_grad_norm=.inf"]) for name in ("ppo", "grpo", "apg")),
        ("shac", ["algorithm.cfg.max_grad_norm=.inf", "trainer.buffer_size=32"]),
        ("grpo", ["algorithm.cfg.reset_every_rollout=false"]),
        ("grpo", ["algorithm.cfg.shared_start=false"]),
        ("apg", ["algorithm.cfg.update_horizon=32", "trainer.buffer_size=7"]),
        ("ppo", ["trainer.exp_name=2024-01-01", "env.cfg.max_episode_steps=7"]),
        ("ppo", ["policy.obs_groups={actor: []}", "algorithm.cfg.minimum_learning_rate=1.0e-3"]),
        ("ppo", ["trainer.output_dir=é🤖", "trainer.total_timesteps=1.0e+15", "trainer.num_envs=100000"]),
    ],
)
def test_what_is_accepted_reads_back_as_the_same(algorithm: str, overrides: list[str]) -> None:
    sections = {"algorithm": {"name": algorithm, "cfg": {}}} if algorithm != "ppo" else {}
    config = make("trainer.num_envs=8", *overrides, **sections)
    again = parse_config(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_a_learning_rate_range_upside_down_is_refused_at_once() -> None:
    assert "below minimum_learning_rate" in str(refused(make, "algorithm.cfg.minimum_learning_rate=1.0"))


# --- keys that contradict each other ----------------------------------------------------------------------


@pytest.mark.parametrize("given", [1, [], {"cfg": 1}, {"cfg": {"gym_config": 3}}])
def test_what_stands_beside_a_gym_config_must_be_a_section(given: dict[str, Any] | int | list[Any]) -> None:
    error = refused(make, trainer={"gym_config": str(CART_POLE)}, env=given)
    assert all(key.startswith("env") for key in keys_of(error))


def test_a_gym_config_replaces_a_learning_env_on_the_command_line() -> None:
    assert make(f"trainer.gym_config={CART_POLE}").env.id == "EmbodiedEnv"


@pytest.mark.parametrize("key", ["num_envs", "buffer_size"])
@pytest.mark.parametrize("value", ["'1'", "true", "x", "[1]"])
def test_what_cloning_does_not_use_must_be_a_number_all_the_same(key: str, value: str) -> None:
    sections = {"algorithm": {"name": "bc", "cfg": {}}, "data": {"source": "engine", "task": "PushCubeExpert"}}
    config = make("trainer.num_envs=7", trainer={}, env="PushCubeRL", **sections)
    assert "trainer.num_envs (override)" in [notice.key for notice in config.notices]
    assert f"trainer.{key}" in str(refused(make, f"trainer.{key}={value}", trainer={}, env="PushCubeRL", **sections))


def test_a_misspelled_family_is_told_from_a_module(tmp_path: Path) -> None:
    text = "Did you mean 'playground:CartpoleBalance'?"
    assert text in str(refused(make, "env=playgound:CartpoleBalance"))
    (tmp_path / "a.json").write_text(json.dumps({**BASE, "trainer": trainer(learning_env="playgound:CartpoleBalance")}))
    assert text in str(refused(load_config, tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("trainer", 5), ("trainer", None), ("policy", "x"), ("algorithm", []), ("runtime", "x"), ("compat", ["x"])],
)
def test_a_section_of_another_kind_is_refused(key: str, value: int | list[str] | str | None) -> None:
    data = {**copy.deepcopy(BASE), key: value}
    for compat in ({}, {"compat": "embodichain-0.3"}):
        refused(parse_config, {**compat, **data})


def test_options_without_effect_leave_the_sizes_to_the_algorithm():
    sections = {
        "algorithm": {"name": "bc", "cfg": {"device": None}},
        "data": {"source": "engine", "task": "PushCubeExpert"},
    }
    config = make(trainer={}, env="PushCubeRL", **sections)
    assert parse_config(config.to_dict()) == config
