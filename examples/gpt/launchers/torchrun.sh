#!/bin/sh
# A script that calls torchrun and cannot be edited, with stand-ins first in PATH: ./torchrun.sh [FLAGS OF THE SCRIPT]
# In an image: RUN flashrecovery shim /opt/flashrecovery --standby 1, and ENV PATH=/opt/flashrecovery:$PATH
set -eu
here=$(cd "$(dirname "$0")" && pwd)
shims=$(mktemp -d)
trap 'rm -r "$shims"' EXIT
flashrecovery shim "$shims" --standby 1 >&2
export PATH="$shims:$PATH"
torchrun --standalone --nproc-per-node "${NPROC:-4}" "$here/../train_ddp.py" "$@"
