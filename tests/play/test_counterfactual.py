"""``ejax evaluate --counterfactual``: sentences and files of them, what the policy reads, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tables import cases, refused
from tiny import tiny

from ejax.config import parse_config
from ejax.evaluate import main
from ejax.numerics.text import as_bytes
from ejax.play.counterfactual import InstructedPolicy, read_sentences
from ejax.run import train


def test_sentences_are_given_and_read_from_files(tmp_path: Path) -> None:
    file, empty = tmp_path / "sentences.txt", tmp_path / "empty.txt"
    file.write_text("red to the left\n\n  blue to the right \nred to the left\n")
    empty.write_text("\n")
    assert read_sentences(["go", str(file), "go"]) == ["go", "red to the left", "blue to the right"]
    refused(read_sentences, [str(empty)], match=r"empty\.txt has no sentence")


def test_the_policy_reads_the_sentence_in_every_row_of_the_observation() -> None:
    class Echo:
        def apply(self, params: Any, obs: Any, **options: Any) -> Any:
            return params, obs, options

    obs = {"instruction": np.zeros((2, 3, 4), np.uint8), "state": np.ones((2, 3, 1))}
    policy: Any = InstructedPolicy(Echo(), "instruction")  # type: ignore[arg-type]
    params, seen, options = policy.apply((7, as_bytes("red", 5)), obs, observe=True)
    assert (params, options) == (7, {"observe": True}) and seen["state"] is obs["state"]
    np.testing.assert_array_equal(seen["instruction"], np.broadcast_to(as_bytes("red", 5), (2, 3, 5)))


@cases(
    "options text",
    ([], "has no ending(state) or cannot be drawn; --counterfactual needs both"),
    (["--engine", "mjx"], "--engine does not go with --counterfactual"),
    (["--noise", "0.1"], "--noise does not go with --counterfactual"),
    (["--sample"], "--sample does not go with --counterfactual"),
    (["--episodes", "9"], "draws at most 8 starts; got --episodes 9"),
)
def test_what_cannot_be_imagined_is_refused(
    tmp_path_factory: pytest.TempPathFactory, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "imagined"
    if not folder.exists():
        train(parse_config(tiny(iterations=1)), run_dir=folder)
    assert main([str(folder), "--counterfactual", "go", *options]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
