"""A keyframe `home` with ctrl and a mocap body's place.

RIGHT: the start is what mj_resetDataKeyframe sets; or refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import main, refused

import ejax


class Arm(ejax.MuJoCoTask):
    model = """<mujoco><worldbody><body name="goal" mocap="true"><geom size=".02" contype="0" conaffinity="0"/></body>
      <body name="arm" pos="0 0 1"><joint name="arm" axis="0 1 0"/><geom size=".1" mass="1"/></body></worldbody>
      <actuator><position name="arm" joint="arm" kp="9" ctrlrange="-3 3"/></actuator>
      <keyframe><key name="home" qpos="1.2" ctrl="1.1" mpos="0.4 0.1 0.6" mquat="1 0 0 0"/></keyframe></mujoco>"""
    episode_length = 5

    def rewards(self, world, before):
        return {"one": jnp.ones(())}


@main
def report():
    if text := refused(Arm, physics="mujoco"):
        return f"REFUSED {text[:200]}"
    env = Arm(physics="mujoco", start_noise=0.0)
    goal = np.asarray(env.world(env.reset(jax.random.key(0))[0]).body("goal").position)
    return f"{'RIGHT' if np.allclose(goal, [0.4, 0.1, 0.6], atol=1e-6) else 'WRONG'} the goal is at {goal}"
