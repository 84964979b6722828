"""Two unnamed joints of one body.

RIGHT: nq + nv numbers are observed; or the body is named. WRONG: some are missing.
"""

import jax
import jax.numpy as jnp
from common import main, refused

import ejax


class Pole(ejax.MuJoCoTask):
    model = """<mujoco><worldbody><body name="cart"><joint name="cart" type="slide" axis="1 0 0"/><geom size=".1"/>
      <body name="pole" pos="0 0 .1"><joint axis="0 1 0"/><joint axis="1 0 0"/><geom size=".05"/></body>
      </body></worldbody>
      <actuator><motor name="cart" joint="cart" ctrlrange="-1 1"/></actuator></mujoco>"""
    episode_length = 5

    def rewards(self, world, before):
        return {"one": jnp.ones(())}


@main
def report():
    if text := refused(lambda: Pole(physics="mujoco").reset(jax.random.key(0))):
        return f"{'REFUSED' if 'pole' in text else 'WRONG'} {text[:200]}"
    shape = Pole(physics="mujoco").reset(jax.random.key(0))[1].shape
    return f"{'RIGHT' if shape == (6,) else 'WRONG'} the observation has {shape}, the model 3 + 3"
