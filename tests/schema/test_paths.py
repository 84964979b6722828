"""Names of the parts of a tree: no two are equal, and each is found again."""

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
from case_tables import cases, refused

from ejax.runtime.tree_text import named_leaves
from ejax.schema.paths import find, leaves, named, nest, part_names, unique, within

ODD: dict[str, Any] = {"a/b": 1, "100%": {"ü x": 2, "back\\slash": 3}, "A": 4, "a": 5, "observation.state": 6, ".": 7}


def test_ordinary_names_are_joined_by_dots_as_they_always_were() -> None:
    tree = {"train": {"params": [jnp.zeros(1), {"w": jnp.zeros(2)}]}, "observation.state": jnp.zeros(3), **ODD}
    tree |= {"robot": {"q": 1}, "robot.extra": 2}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert list(named_leaves(tree)) == [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


@cases(
    "tree",
    {"a.b": 1, "a": {"b": 2}},
    {"a": {"b": 1, "c": 2}, "a.b": 3, "d.e": 4},
    {"a.b": 1, "a\\": {"b": 2}, "a": {"b": 3}},
    {"a": {"b.c": 1, "b": {"c": 2}}, "a.b": {"c": 3}},
    {"a": (1, 2), "a.0": 3},
    {"": {"b": 1}, ".b": 2, "x": {"": 3}},
    {"a": {"b": {"c": 1}}, "a.b": {"c": 2}, "a.b.c": 3},
)
def test_names_that_would_be_equal_are_escaped_also_below_a_prefix(tree: Any) -> None:
    assert list(named_leaves(tree).values()) == jax.tree.leaves(tree)
    below = {name.removeprefix("state."): x for name, x in named_leaves({"state": tree, "state_x": 0}).items()}
    assert below == {**named_leaves(tree), "state_x": 0}


@cases(
    "tree text",
    ({"a.b": 1, "a": {"b": 2}}, "'a.b' reads like a part of 'a'"),
    ({"robot": {"q": 1}, "robot.extra": 2}, "'robot.extra' reads like a part of 'robot'"),
    ({1: 0, "1": 0}, "non-empty texts"),
    ({"": 0, "b": 0}, "non-empty texts"),
)
def test_parts_of_an_observation_that_one_name_would_mean_are_refused(tree: Any, text: str) -> None:
    refused(named, tree, match=text)


def test_every_part_is_found_by_its_name_and_nests_as_it_was() -> None:
    tree = {**ODD, "robot": {"q.pos": 8, "q": 9}, "robot_x": 10}
    assert {name: find(tree, name) for name in named(tree)} == named(tree)
    assert find(tree, "robot") == {"q.pos": 8, "q": 9}
    assert nest(leaves(tree)) == tree
    for missing in ("robot.q.pos.x", "observation", "", "b"):
        refused(find, tree, missing, error=KeyError)


def test_a_group_is_one_part_or_all_of_a_section() -> None:
    names = ["observation", "observation.state", "robot.q", "robot.v"]
    assert within(names, ["robot", "observation"]) == ("robot.q", "robot.v", "observation")
    assert within(names, []) == tuple(names)


def test_spaces_are_named_as_their_observations() -> None:
    box = gymnasium.spaces.Box(-1, 1, (2,))
    space = gymnasium.spaces.Dict({"b": box, "a": gymnasium.spaces.Dict({"x.y": box})})
    assert list(named(space)) == ["a.x.y", "b"] and named(box) == {"": box}


def test_two_of_one_name_are_refused() -> None:
    assert unique([("a", 1), ("b", 2)], "terms") == {"a": 1, "b": 2}
    refused(unique, [("a", 1), ("a", 1)], "terms", match="two terms are called 'a'")
    refused(part_names, [(1,), ("1",)], match="two parts are called '1'")
