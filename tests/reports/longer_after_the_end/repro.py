"""A linear learning rate, resumed with twice the length.

RIGHT: the run names it, or the rate does not rise. WRONG: no word.
"""

import contextlib
import io

from common import config, main, out, run

from ejax.run import train


@main
def report():
    def made(iterations):
        cfg = {"batch_size": 16, "n_epochs": 1, "lr_scheduler": {"name": "cosine"}}
        return {"algorithm": {"name": "ppo", "cfg": cfg}, "trainer": {"iterations": iterations, "console": True}}

    with contextlib.redirect_stdout(found := io.StringIO()), contextlib.redirect_stderr(found):
        run(**made(3))
        found.truncate(0)
        rest = train(config(**made(6)), resume="latest", run_dir=out() / "run")
    rates = [line["train/learning_rate"] for line in rest.train_history if "train/learning_rate" in line]
    said = [line for line in found.getvalue().splitlines() if "learning rate" in line or "schedule" in line]
    rises = any(after > before + 1e-12 for before, after in zip(rates[-3:], rates[-2:], strict=False))
    return f"{'RIGHT' if said and not rises else 'WRONG'} rates {rates}; said: {said}"
