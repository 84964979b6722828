"""The velocity tasks by their robots' names."""

from ejax.envs.locomotion.bipeds import G1_TASK, H1_2_TASK, MICRODUCK_TASK
from ejax.envs.locomotion.quadrupeds import ANYMAL_C_TASK, GO1_TASK, GO2_TASK, QUADRUPED_TASK
from ejax.envs.locomotion.tasks import VelocityTask

TASKS: dict[str, VelocityTask] = {
    task.robot.name: task
    for task in (QUADRUPED_TASK, GO1_TASK, G1_TASK, GO2_TASK, ANYMAL_C_TASK, H1_2_TASK, MICRODUCK_TASK)
}
