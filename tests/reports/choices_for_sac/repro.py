"""SAC in an environment of choices. RIGHT: refused by name before anything is built. WRONG: lines of traceback."""

import gymnasium
from common import NETWORK, Steps, main, refused, run


class Choices(Steps):
    action_space = gymnasium.spaces.Discrete(3)


@main
def report():
    policy = {"name": "actor_q", "squash_actions": True, "actor": NETWORK, "critic": NETWORK}
    options = {"batch_size": 8, "learning_starts": 8, "replay": {"capacity": 64}}
    text = refused(run, "run", "repro:Choices", policy=policy, algorithm={"name": "sac", "cfg": options})
    found = (
        text and text.startswith("ConfigError") and ("Discrete" in text or "choice" in text) and "sac" in text.lower()
    )
    return f"{'REFUSED' if found else 'WRONG'} {(text or '')[:300]}"
