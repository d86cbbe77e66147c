#!/bin/bash
# @PRESET@: one SGLang server over @NODES@ node(s), started by sbatch.
#SBATCH --job-name=@JOB@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@GPUS@
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

@EXPORTS@
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${SGLANG_DIST_PORT:-20000}

# Each task is one node; SLURM_NODEID is its rank. A node that fails takes the others down.
srun --kill-on-bad-exit=1 bash -c '
  set -euo pipefail
  exec "${PYTHON:-python3}" -m sglang.launch_server \
    @ARGUMENTS@ \
    --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --dist-init-addr "'"$head:$port"'" \
    --host 0.0.0.0 --port "${SGLANG_PORT:-30000}"
'
