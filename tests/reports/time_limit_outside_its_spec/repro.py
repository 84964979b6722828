"""A TimeLimit of 12,000 steps around a class without a spec. RIGHT: the evaluated episode counts with its length."""

import gymnasium
from common import Steps, main, refused, run

SLOW = True


class Endless(Steps):
    def step(self, action):
        return self.see(), 1.0, False, False, {}


def long_episodes():
    return gymnasium.wrappers.TimeLimit(Endless(), 12_000)


@main
def report():
    evaluated = {"enable_eval": True, "eval_freq": 0, "num_eval_envs": 1, "num_eval_episodes": 1}
    trainer = {"num_envs": 2, "iterations": 1, "final_eval_episodes": 0, **evaluated}
    found = {}
    text = refused(lambda: found.update(run("run", "repro:long_episodes", trainer=trainer).last_eval_metrics))
    length = found.get("eval/avg_length")
    return f"{'RIGHT' if length == 12_000 else 'WRONG'} {text or f'length {length}'}"[:300]
