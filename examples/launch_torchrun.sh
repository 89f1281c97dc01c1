#!/usr/bin/env bash
# Train a recipe in several processes with torchrun, on this machine or on several.
#
#   examples/launch_torchrun.sh fit digits-lt --trainer.accelerator cpu --out runs/two      two processes on this machine
#   PROCESSES=8 examples/launch_torchrun.sh fit deit-s-imagenet --data-root DIR             the eight GPUs of one machine
#   NODES=4 PROCESSES=8 HOST=node0 examples/launch_torchrun.sh fit ...                      the same line on each of four
#
# STRATEGY is ddp, or fsdp to divide parameters, gradients and optimizer states among the processes. The run folder must be
# on a disk that all machines share; process 0 writes it. Stopped, the same line with --resume goes on.
set -euo pipefail
: "${NODES:=1}" "${PROCESSES:=2}" "${STRATEGY:=ddp}" "${PYTHON:=python}"
if [ "$NODES" = 1 ]; then
    meeting=(--standalone)
else
    meeting=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "${HOST:?the name of one of the machines}:29500"
             --rdzv-id "${JOB:-batchformer}")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$PROCESSES" -m batchformer.cli "$@" \
    --trainer.num_nodes "$NODES" --trainer.devices "$PROCESSES" --trainer.strategy "$STRATEGY"
