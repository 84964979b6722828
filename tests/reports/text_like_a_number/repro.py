"""An option "12e3" in quotes. RIGHT: it stays text, from YAML and from an override. WRONG: it becomes 12000.0."""

from dataclasses import dataclass

import yaml
from common import config, main, out, refused

from ejax.config import load_config
from ejax.envs.tasks.point_mass import PointMassRL
from ejax.schema.trust import trust


@dataclass(frozen=True)
class Clip(PointMassRL):
    clip: str = "walk"


@main
def report():
    trust("repro:Clip")
    tree = config("repro:Clip", {"clip": "walk"}).to_dict()
    (out() / "x.yaml").write_text(yaml.safe_dump(tree).replace("clip: walk", "clip: '12e3'"))
    seen = []
    for overrides in ([], ["env.cfg.clip='67217e15'"], ["env.cfg.clip='0042'"]):
        if text := refused(load_config, out() / "x.yaml", overrides):
            return f"WRONG {text[:300]}"
        seen.append(load_config(out() / "x.yaml", overrides).env.cfg["clip"])
    return f"{'RIGHT' if seen == ['12e3', '67217e15', '0042'] else 'WRONG'} {seen}"
