#!/bin/bash
# The server on the nodes of a SLURM job, as described in docs/cluster.md. The job's first node serves and trains; every other
# one adds an engine for each of its GPUs. The nodes share the home directory, with an environment of the extras gpu,cluster.
#
#   .ci/install.sh "$HOME/tinker-venv" gpu,cluster
#   MODEL=Qwen/Qwen3-VL-4B-Instruct=$HOME/models/Qwen3-VL-4B-Instruct sbatch deploy/slurm.sh
#   ssh -L 8000:127.0.0.1:8000 NODE                     # the job's first node, as `squeue` lists it
#
# A shared file system without locks cannot have SQLite: set TINKER_SERVER_DATABASE_URL to a PostgreSQL.
#SBATCH --job-name=tinker-server
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120

set -euo pipefail
umask 077
export PATH="$HOME/tinker-venv/bin:$PATH"
export TINKER_SERVER_DATA_DIR="$HOME/tinker-data" TINKER_SERVER_DRAIN_S=20
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$TINKER_SERVER_DATA_DIR/ray-token"
mkdir -p "$TINKER_SERVER_DATA_DIR"
[ -s "$RAY_AUTH_TOKEN_PATH" ] || python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH"

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # `| head` could end what writes to it, and so the job
export RAY_ADDRESS="$(getent ahostsv4 "$head" | awk 'NR == 1 { print $1 }'):6379"
# Ray's command starts Ray on every node, the server on the first alone, and ends Ray when the server has ended.
srun --kill-on-bad-exit=1 ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus 0 --disable-usage-stats \
    -- tinker-server serve --cluster --cluster-address "${RAY_ADDRESS%:*}" --model "$MODEL" &
trap 'kill -TERM %1' TERM
wait %1 || wait %1
