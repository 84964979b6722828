"""`ejax evaluate --engine all` where an engine is not installed.

RIGHT: the table names what it leaves out, and how to install it.
"""

from common import main

from ejax.play.comparison import as_markdown


@main
def report():
    made = {"rows": [], "differences": [], "episodes": 2, "seed": 0, "checkpoint": "x", "tolerance": 0.01}
    text = as_markdown({**made, "left_out": {"warp": "pip install -e '.[warp]'"}})
    return f"{'RIGHT' if 'warp' in text and 'pip install' in text else 'WRONG'} {text[-120:]!r}"
