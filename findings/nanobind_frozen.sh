#!/usr/bin/env bash
# triton 3.9.0: a process that has called gc.freeze() ends with a report of leaks, though nothing leaks.
#
# gc.freeze() is what servers call before they fork, to keep memory shared. At the interpreter's end Python's collector
# does not look at what is frozen, so the cycles of a binding made with nanobind (triton._C.libtriton) are still there when
# nanobind counts. gc.unfreeze() in an exit handler ends it. triton 3.8.0 did not print this.
#
# Seen (triton 3.9.0, Python 3.11): lines that say "leaked": 0 as it is, 27 frozen, 0 frozen and unfrozen at exit.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check triton==3.9.0
cat > "$folder/end.py" <<'PYTHON'
import atexit
import gc
import sys

import triton._C.libtriton

if "freeze" in sys.argv:
    gc.collect()
    gc.freeze()
if "unfreeze" in sys.argv:
    atexit.register(gc.unfreeze)
PYTHON
leaks() { "$folder/venv/bin/python" "$folder/end.py" "$@" 2>&1 | grep -c leaked || true; }
plain=$(leaks) frozen=$(leaks freeze) unfrozen=$(leaks freeze unfreeze)
echo "lines that say leaked: $plain as it is, $frozen frozen, $unfrozen frozen and unfrozen at exit"
[ "$plain" -eq 0 ] && [ "$frozen" -gt 0 ] && [ "$unfrozen" -eq 0 ]
