#!/bin/sh
# accelerate launch with its configuration file, and FlashRecovery below it: ./accelerate.sh [FLAGS OF THE SCRIPT]
# In multi-node jobs run it on every machine, with --machine_rank, as without FlashRecovery.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
exec flashrecovery run --standby 1 -- \
    accelerate launch --config_file "$here/accelerate.yaml" "$here/../train_accelerate.py" "$@"
