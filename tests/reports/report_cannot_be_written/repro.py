"""A run in which nothing can be written any more.

RIGHT: evaluate prints its metrics, and names what was not written.
"""

import contextlib
import io

from common import main, run

from ejax import evaluate


@main
def report():
    folder = run(trainer={"iterations": 1}).run_dir
    (folder / "evaluations").write_text("a file in the place of the folder")
    with contextlib.redirect_stdout(found := io.StringIO()), contextlib.redirect_stderr(found):
        code = evaluate.main([str(folder), "--episodes", "2", "--num-envs", "2"])
    text = found.getvalue()
    return f"{'RIGHT' if 'avg_reward' in text and 'evaluations' in text else 'WRONG'} code {code}: {text[:300]!r}"
