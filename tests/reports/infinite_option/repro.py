"""A task with an option `inf`. RIGHT: it is exported, in strict JSON. WRONG: "not JSON compliant", never exported."""

import json
from dataclasses import dataclass
from importlib.util import find_spec

from common import main, out, refused, run

from ejax.envs.tasks.point_mass import PointMassRL

SLOW = True


@dataclass(frozen=True)
class Unlimited(PointMassRL):
    speed_limit: float = float("inf")


@main
def report():
    if find_spec("flatbuffers") is None:
        return "INFO needs flatbuffers"
    from interop.export import export_run

    folder = run("run", "repro:Unlimited", {"max_episode_steps": 11}, trainer={"iterations": 1}).run_dir
    if text := refused(export_run, folder, out() / "exported", ["stablehlo"]):
        return f"WRONG {text[:300]}"
    text = (out() / "exported" / "contract.json").read_text()
    return f"{'WRONG' if refused(json.loads, text, parse_constant=float.fromhex) else 'RIGHT'}"
