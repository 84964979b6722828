"""A .pt file that holds np.float64. RIGHT: it is read, or the refusal names the key and the remedy."""

from importlib.util import find_spec

import numpy as np
from common import main, out, refused


@main
def report():
    if find_spec("torch") is None:
        return "INFO needs torch"
    import torch

    from interop.plain_pt import load_plain

    torch.save({"policy": {}, "best_eval_value": np.float64(0.5)}, out() / "x.pt")
    if (text := refused(load_plain, out() / "x.pt")) is None:
        return "RIGHT"
    return f"{'REFUSED' if 'best_eval_value' in text and 'float(' in text else 'WRONG'} {text[:300]}"
