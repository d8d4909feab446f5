"""Runs a script so that all ranks can share one GPU, with kernels that repeat bitwise: ``one_gpu.py SCRIPT ARGUMENTS``,
or ``one_gpu.py ARGUMENTS`` with the script in ``ONE_GPU_SCRIPT``.

NCCL refuses two ranks on one device of a host; with a host's name of its own for each rank it talks over sockets.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if os.environ.get("FLASHRECOVERY_SHARED_GPU") == "1":
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
        os.environ["LOCAL_RANK"] = "0"

    import torch

    from tests.support import optimizers

    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)
    optimizers.choose()
    script = os.environ.get("ONE_GPU_SCRIPT")
    sys.argv = sys.argv[1:] if script is None else [script, *sys.argv[1:]]
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
