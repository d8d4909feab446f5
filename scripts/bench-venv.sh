#!/usr/bin/env bash
# A virtual environment of its own for the peers that the benchmarks compare with.
#
# torch comes first and pinned; the peers come with --no-deps and the few pure-Python packages they import are
# named here, so that none of them can pull another torch build. The project itself is installed too (without its
# dependencies being resolved again), so that every system in the comparison runs on one torch and one Python.
set -euo pipefail
cd "$(dirname "$0")/.."

BENCH_VENV="${BENCH_VENV:-/tmp/bench-venv}"
PYTHON="${PYTHON:-python3}"
TORCH_VERSION="${TORCH_VERSION:-2.13.0}"

if [ ! -x "$BENCH_VENV/bin/python" ]; then
    "$PYTHON" -m venv "$BENCH_VENV"
fi
PIP=("$BENCH_VENV/bin/python" -m pip --disable-pip-version-check)

# shellcheck disable=SC2086  # TORCH_INDEX holds whole pip options
"${PIP[@]}" install --quiet ${TORCH_INDEX:-} "torch==$TORCH_VERSION" -c constraints.txt
"${PIP[@]}" install --quiet -c constraints.txt --editable ".[test]"
"${PIP[@]}" install --quiet --no-deps torchft==0.2.0 nvidia-resiliency-ext==0.4.1 lm-resiliency==0.2.0
"${PIP[@]}" install --quiet -c constraints.txt \
    "opentelemetry-sdk>=1.39" "opentelemetry-exporter-otlp-proto-http>=1.39" \
    defusedxml nvidia-ml-py

"$BENCH_VENV/bin/python" - "$TORCH_VERSION" <<'PY'
import importlib
import sys

import torch

wanted = sys.argv[1]
if not torch.__version__.startswith(wanted):
    sys.exit(f"the bench environment ended with torch {torch.__version__}, not {wanted}")
for name in ("torchft", "nvidia_resiliency_ext.inprocess", "lm_resiliency", "flashrecovery"):
    try:
        importlib.import_module(name)
    except ImportError as e:
        print(f"{name}: cannot be imported ({e}); its benchmark will say so")
    else:
        print(f"{name}: ok")
PY
echo "bench environment ready: $BENCH_VENV (torch $TORCH_VERSION)"
