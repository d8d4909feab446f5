#!/usr/bin/env bash
# A virtual environment of its own with a CUDA build of torch, which runs on the CPU where there is no GPU (5.5 GB).
#
# Everything but torch, and what torch itself chooses, comes in the versions of constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

CUDA_VENV="${CUDA_VENV:-/tmp/cuda-venv}"
PYTHON="${PYTHON:-python3}"
CUDA_TORCH_VERSION="${CUDA_TORCH_VERSION:-2.14.1}"

if [ ! -x "$CUDA_VENV/bin/python" ]; then
    "$PYTHON" -m venv "$CUDA_VENV"
fi
PIP=("$CUDA_VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir)
constraints="$CUDA_VENV/constraints.txt"
{ grep -vE '^(torch|triton|setuptools|filelock|sympy)==' constraints.txt; echo "torch==$CUDA_TORCH_VERSION"; } >"$constraints"

# shellcheck disable=SC2086  # CUDA_TORCH_INDEX holds whole pip options
"${PIP[@]}" ${CUDA_TORCH_INDEX:-} "torch==$CUDA_TORCH_VERSION"
"${PIP[@]}" -c "$constraints" --editable ".[test]"

"$CUDA_VENV/bin/python" - "$CUDA_TORCH_VERSION" <<'PY'
import sys

import torch

if not torch.__version__.startswith(sys.argv[1]) or not torch.distributed.is_nccl_available():
    sys.exit(f"the environment has torch {torch.__version__}, not a build of {sys.argv[1]} with NCCL")
PY
echo "CUDA environment ready: $CUDA_VENV (torch $CUDA_TORCH_VERSION)"
