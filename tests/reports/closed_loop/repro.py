"""Fingers coupled by <joint>.

RIGHT: at the default start noise they start less than 1 mm apart. WRONG: a jolt follows.
"""

import jax
import jax.numpy as jnp
from common import main

import ejax

FINGER = '<body pos="{x} 0 0"><joint name="{n}" type="slide" axis="1 0 0"/><geom size=".02" mass="1"/></body>'


class Gripper(ejax.MuJoCoTask):
    model = f"""<mujoco><worldbody>{FINGER.format(x=0, n="a")}{FINGER.format(x=1, n="b")}</worldbody>
      <equality><joint joint1="a" joint2="b" solref="0.005 1"/></equality>
      <actuator><motor name="a" joint="a" ctrlrange="-1 1"/></actuator></mujoco>"""
    episode_length = 5

    def rewards(self, world, before):
        return {"one": jnp.ones(())}


@main
def report():
    env = Gripper(physics="mujoco")
    states = jax.vmap(lambda key: env.reset(key)[0])(jax.random.split(jax.random.key(0), 64))
    gap = float(jnp.abs(jax.vmap(lambda s: env.world(s).qpos[0] - env.world(s).qpos[1])(states)).max())
    return f"{'RIGHT' if gap < 1e-3 else 'WRONG'} the fingers start up to {1e3 * gap:.2f} mm apart"
