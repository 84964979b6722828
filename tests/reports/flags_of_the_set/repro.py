"""A LeRobot set with next.done False and next.truncated True at its ends. RIGHT: no frame is terminal."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from common import main, out

import ejax

GOLDEN = Path(ejax.__file__).parents[1] / "tests/golden/lerobot_v3"


@main
def report():
    if find_spec("pyarrow") is None:
        return "INFO needs pyarrow"
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ejax.data.lerobot.read import EpisodeReader

    shutil.copytree(GOLDEN, folder := out() / "kept")
    [file], info = list((folder / "data").rglob("*.parquet")), json.loads((folder / "meta/info.json").read_text())
    table = pq.read_table(file)
    ends = [int(x) for x in table["episode_index"].to_pylist()]
    last = [i + 1 == len(ends) or ends[i + 1] != episode for i, episode in enumerate(ends)]
    for name, values in (("next.done", [False] * len(last)), ("next.truncated", last)):
        table = table.drop_columns([name]) if name in table.column_names else table
        table = table.append_column(name, pa.array(values))
        info["features"][name] = {"dtype": "bool", "shape": [1], "names": None}
    pq.write_table(table, file)
    (folder / "meta/info.json").write_text(json.dumps(info))
    return f"{'WRONG' if EpisodeReader(folder)[0].terminated else 'RIGHT'}"
