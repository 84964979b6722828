"""gym's first API. RIGHT: a text that names the method of the old form, and what to do."""

import numpy as np
from common import Steps, main, refused, run


class OldReset(Steps):
    def reset(self):
        self.t = 0
        return np.zeros(2, np.float32)


class OldStep(Steps):
    def step(self, action):
        return (*super().step(action)[:3], {})


@main
def report():
    texts = [refused(run, name, f"repro:{name}", trainer={"iterations": 1}) or "" for name in ("OldReset", "OldStep")]
    found = "reset(" in texts[0] and "step(" in texts[1]
    return f"{'REFUSED' if found else 'WRONG'} {texts[0][:200]}; {texts[1][:200]}"
