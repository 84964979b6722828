"""Learning test, nightly: three configs as they are shipped, two seeds each, and what their policies must reach.

python tests/learning.py                     # all: by certified.json 7 minutes of CPU
python tests/learning.py point_mass/shac     # one
"""

import sys
import tempfile
import time

from ejax.config import load_config
from ejax.run import train

SEEDS = (1, 2)
LEAST = {"point_mass/shac": 0.95, "cart_pole/ppo": 0.95, "push_cube/ppo": 0.95}
"""Config -> success of the best checkpoint over 1,000 fresh episodes. Each is below the
certified result of both seeds (benchmarks/certified.json) by at least four standard errors of such a share."""


def main(names: list[str]) -> int:
    failed = 0
    for name in names or LEAST:
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                words = [f"trainer.seed={seed}", "trainer.final_eval_episodes=1000", f"trainer.output_dir={folder}"]
                began = time.perf_counter()
                result = train(load_config(name, words, device="cpu"))
            success = result.fresh_eval_metrics["best"]["eval/success_rate"]
            ok = success >= LEAST[name]
            failed += not ok
            verdict = "ok" if ok else f"FAILED, at least {LEAST[name]} is expected"
            print(
                f"{name} seed {seed}: success {success:.3f} in {time.perf_counter() - began:.0f} s: {verdict}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
