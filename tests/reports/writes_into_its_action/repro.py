"""A HostEnv that scales its action in place. RIGHT: it may, and the rollout keeps what the policy drew."""

from common import main, refused, run

from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.tasks.point_mass import PointMassRL


class Scaled(PureHostEnv):
    def __init__(self, num_envs):
        super().__init__(PointMassRL(max_episode_steps=11), num_envs)

    def step(self, action):
        action *= 2.0
        return super().step(action.copy())


@main
def report():
    text = refused(run, "run", "repro:Scaled", trainer={"iterations": 1})
    return f"WRONG {text[:300]}" if text else "RIGHT"
