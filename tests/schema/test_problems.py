"""The vocabulary of problems: how an error shows them."""

from ejax.schema.problems import ConfigError, Problem


def test_keys_with_the_same_problem_share_one_line() -> None:
    slip = "no 'cubee' in the scene; there is cube. Did you mean 'cube'?"
    error = ConfigError([Problem(f"env.events.{i}", slip) for i in range(9)] + [Problem("seed", "got -1")])
    assert len(error.problems) == 10
    assert str(error).splitlines() == [
        "config: 10 problems",
        f"  env.events.0 (and 8 more keys): {slip}",
        "  seed: got -1",
    ]
    two = ConfigError([Problem("a", slip), Problem("b", slip)])
    assert str(two).splitlines()[1:] == [f"  a: {slip}", f"  b: {slip}"]
