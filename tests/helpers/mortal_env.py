"""An environment outside the program whose process is killed once, in the middle of a training."""

import os
import signal
from pathlib import Path
from typing import Any

from host_tasks import Sleepy
from tiny import EPISODE

from ejax.envs.host.pure_host import PureHostEnv
from ejax.envs.tasks.point_mass import PointMassRL


class Mortal(Sleepy):
    """Kills its process at its first step once ``run`` has a checkpoint, unless the file ``killed`` exists."""

    most_s = 0.0

    def __init__(self, run: str, killed: str, num_envs: int) -> None:
        super().__init__(PureHostEnv(PointMassRL(max_episode_steps=EPISODE), num_envs))
        self.run, self.killed = Path(run), Path(killed)

    def before(self) -> None:
        if any(self.run.glob("checkpoints/*_step_*/meta.json")):
            try:
                with self.killed.open("x") as file:  # one of all processes
                    file.write(str(os.getpid()))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def mortal(run: str, killed: str, num_envs: int = 1, **options: Any) -> Mortal:
    del options
    return Mortal(run, killed, num_envs)
