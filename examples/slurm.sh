#!/usr/bin/env bash
# Train on several machines under SLURM: one process for each GPU, which find each other by SLURM's variables.
#   sbatch examples/slurm.sh configs/point_mass/ppo.yaml trainer.exp_name=many
#SBATCH --job-name=ejax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
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
resume=()
if [ -d "$run" ]; then resume=(--resume latest); fi
exec srun --kill-on-bad-exit=1 python -m ejax.train --config "$config" --run "$run" "${resume[@]}" \
    --device cuda --distributed "$@"
