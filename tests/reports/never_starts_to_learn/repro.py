"""learning_starts beyond total_timesteps. RIGHT: refused, or named. WRONG: no gradient step, and no word."""

import contextlib
import io

from common import NETWORK, main, refused, run


@main
def report():
    policy = {"name": "actor_q", "squash_actions": True, "actor": NETWORK, "critic": NETWORK}
    options = {"batch_size": 8, "learning_starts": 10_000, "replay": {"capacity": 20_000}}
    sections = {"policy": policy, "algorithm": {"name": "sac", "cfg": options}, "trainer": {"console": True}}
    with contextlib.redirect_stdout(found := io.StringIO()), contextlib.redirect_stderr(found):
        text = refused(run, **sections)
    said = "learning_starts" in found.getvalue()
    return f"{'REFUSED' if text and 'learning_starts' in text else 'RIGHT' if said else 'WRONG'} {(text or '')[:300]}"
