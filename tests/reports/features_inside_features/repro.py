"""A LeRobot set with `action` beside `action.joints`, as DROID's. RIGHT: it opens; or the refusal names an option."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from common import main, out, refused

import ejax

GOLDEN = Path(ejax.__file__).parents[1] / "tests/golden/lerobot_v3"


@main
def report():
    if find_spec("pyarrow") is None:
        return "INFO needs pyarrow"
    import pyarrow.parquet as pq

    from ejax.data.lerobot.read import EpisodeReader

    shutil.copytree(GOLDEN, folder := out() / "droid")
    [file], info = list((folder / "data").rglob("*.parquet")), json.loads((folder / "meta/info.json").read_text())
    table = pq.read_table(file)
    pq.write_table(table.append_column("action.joints", table["action"]), file)
    info["features"]["action.joints"] = info["features"]["action"]
    (folder / "meta/info.json").write_text(json.dumps(info))
    text = refused(lambda: EpisodeReader(folder)[0].frames["action"])
    return f"{'REFUSED' if 'rename=' in text or '--' in text else 'WRONG'} {text[:300]}" if text else "RIGHT"
