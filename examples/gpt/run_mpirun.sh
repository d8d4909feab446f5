#!/usr/bin/env bash
# One task a rank, started by mpirun; a rank is killed in the middle, and mpirun does not notice.
#
#   examples/gpt/run_mpirun.sh [RUN_DIR] [SCRIPT] [arguments of the script]
#
# NPROC=4       ranks
# KILL=...      the fault, as `flashrecovery run --inject` takes it; empty: none
# MPIRUN=...    more options of mpirun, such as "--hostfile hosts --map-by ppr:8:node -x MASTER_ADDR -x FLASHRECOVERY_TOKEN"
set -euo pipefail

here=$(dirname "$(realpath "$0")")
run_dir=${1:-runs/mpirun}
script=${2:-$here/train_ddp.py}
shift $(($# < 2 ? $# : 2))
(($#)) || set -- --steps 60 --digest
kill=${KILL-rank=1,fault=sigkill,at=backward,step=30}

# shellcheck disable=SC2086 # MPIRUN are several words
exec mpirun -n "${NPROC:-4}" --oversubscribe ${MPIRUN:-} \
    flashrecovery adopt --standby 1 --run-dir "$run_dir" ${kill:+--inject "$kill"} "$script" "$@"
