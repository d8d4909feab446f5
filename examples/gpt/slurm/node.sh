#!/bin/bash
# One node's agent, started by gpt.sbatch or spare.sbatch with srun on each node; "$@" are further options, the training
# script and its arguments. RUN_DIR has what is the same for all nodes; what Slurm says of this one is in SLURM*.

set -euo pipefail
options=(--config "$RUN_DIR/job.yaml" --node-name "$SLURMD_NODENAME")

# With topology/tree the address is the way from the top switch to the node, such as core.leaf7.node12. All but the node
# itself is what fails together with it.
if [[ ${SLURM_TOPOLOGY_ADDR_PATTERN:-} == *switch.node ]]; then
    options+=(--failure-domain "${SLURM_TOPOLOGY_ADDR%.*}")
fi

trap : TERM # the agent gets it as well; wait for its end
flashrecovery run "${options[@]}" "$@" && exit 0
code=$?

# A job whose first node is lost has neither controller nor batch script any more, and Slurm lets it be (--no-kill). When
# the agents of its other nodes have given up (timeouts.controller_gone_s) they queue it again.
first=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -oP '\bBatchHost=\K\S+')
left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)
if [[ -n $first && -n $left ]] && ! scontrol show hostnames "$left" | grep -qxF "$first"; then
    echo "node.sh: the job has lost its first node $first; it is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID" || true # another node may have done so
fi
exit "$code"
