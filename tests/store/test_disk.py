"""Disks that are full or cannot be written to: one line, and exit code 2."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_configs import BASE

from ejax import train
from ejax.store import checkpoint


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG])
def test_a_disk_that_refuses_is_one_line_and_exit_2(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code), str(tmp_path))

    monkeypatch.setattr("ejax.training.start.create_run_directory", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(BASE))
    assert train.main(["--config", "a.json", "--device", "cpu"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("ejax train: ") and os.strerror(code) in told and "\n" not in told


def test_a_checkpoint_on_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 7 bytes: No space left [os_error_code='28']")

    monkeypatch.setattr("orbax.checkpoint.v1.save", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        checkpoint.save_checkpoint(tmp_path, "a_step_1", {"x": np.zeros(3)}, {})
    assert caught.value.errno == errno.ENOSPC
