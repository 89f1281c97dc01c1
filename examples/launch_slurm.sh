#!/usr/bin/env bash
# Train a recipe on several machines under SLURM: Lightning reads ranks and addresses from SLURM's variables.
#
#   sbatch --nodes 4 examples/launch_slurm.sh fit deit-s-imagenet --data-root DIR --out runs/deit-s
#
# One task for each GPU, which is what Lightning expects. A job that SLURM stops and queues again goes on from its last
# checkpoint; after the end of its time, submit the same line with --resume. The run folder must be on a disk that all
# machines share.
#SBATCH --job-name=batchformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=slurm-%j.out
set -euo pipefail
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=(--resume); fi
export OMP_NUM_THREADS=1
srun python -m batchformer.cli "$@" "${resume[@]}" --trainer.num_nodes "$SLURM_JOB_NUM_NODES" \
    --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.strategy "${STRATEGY:-ddp}"
