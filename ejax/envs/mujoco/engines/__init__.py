"""The physics engines, a file each with ``step``; ``ejax.envs.mujoco.choice.ENGINES`` is their table."""
