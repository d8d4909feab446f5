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

exec flashrecovery run "${options[@]}" "$@"
