"""Stand-ins for SLURM on one machine: ``sbatch``, which reads a script's options, and ``srun``, which starts its tasks.

Tasks get the variables that SLURM's manual lists (sbatch, srun: OUTPUT ENVIRONMENT VARIABLES), and see the GPUs that
its options leave them: all of the machine's, or with ``--gpus-per-task`` their own, which are then counted from 0.
"""

import os
import subprocess
import sys
from pathlib import Path


def sbatch(script: Path, *arguments: str, folder: Path, job: int, **given: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script, with ``given`` options in place of its own. ``folder`` is for the stand-in of ``srun``."""
    lines = [line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    options = {name: value for name, _, value in (line.partition("=") for line in lines)}
    options |= {name.replace("_", "-"): value for name, value in given.items()}
    exported = {f"SLURM_{name.upper().replace('-', '_')}": value for name, value in options.items()}
    (srun := folder / "srun").write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    srun.chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **exported, "SLURM_JOB_ID": str(job), "PATH": path}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def _visible(local: int) -> str:
    of_each = int(os.environ.get("SLURM_GPUS_PER_TASK", 0))
    if of_each and os.environ.get("SLURM_GPU_BIND", f"per_task:{of_each}") != "none":
        return ",".join(map(str, range(of_each)))
    if os.environ.get("SLURM_GPU_BIND") != "none":
        return str(local)  # a site may bind each task to the nearest GPU, unless it is forbidden to
    return ",".join(map(str, range(int(os.environ["SLURM_GPUS_PER_NODE"]))))


def _srun(command: list[str]) -> int:
    nodes, of_each = int(os.environ["SLURM_NODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for rank in range(nodes * of_each):
        local = rank % of_each
        variables = {
            "SLURM_NTASKS": str(nodes * of_each),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(rank // of_each),
            "SLURM_STEP_NODELIST": "localhost" if nodes == 1 else f"node[01-{nodes:02}]",
            "SLURM_STEP_NUM_NODES": str(nodes),
            "CUDA_VISIBLE_DEVICES": _visible(local),
        }
        tasks.append(subprocess.Popen(command, env=os.environ | variables))
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(_srun(words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]))
