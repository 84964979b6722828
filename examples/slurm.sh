#!/usr/bin/env bash
# Train on several machines under SLURM: one process for each GPU, which find each other by SLURM's variables.
# JAX gives process i of a machine the i-th GPU that it sees. So all must see all GPUs of their machine, which
# --gpus-per-task would prevent.
#   sbatch examples/slurm.sh configs/point_mass/ppo.yaml trainer.exp_name=many
#SBATCH --job-name=ejax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --gpu-bind=none
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

config=$1
shift
# the run's folder must be one that all machines see
run=${EJAX_RUN:-$PWD/outputs/slurm_${SLURM_JOB_ID:?start it with sbatch}}

# a job that was requeued goes on where its last checkpoint stands
resume=
if [ -d "$run" ]; then resume="--resume latest"; fi
# srun does not take over sbatch's --cpus-per-task
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    ejax train --config "$config" --run "$run" $resume --device cuda --distributed "$@"
