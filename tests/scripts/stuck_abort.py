"""The DDP example, on one rank of which something under way does not end when its groups are abandoned: as an NCCL
communicator may that does not return from its abort. Its replacement does not have that.

    stuck_abort.py RANK [options of train_ddp.py]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from flashrecovery.groups import native_build

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "train_ddp.py"

if os.environ["RANK"] == sys.argv.pop(1) and os.environ.get("FLASHRECOVERY_GENERATION") == "0":
    native_build.native().aborting = lambda outer: True
sys.path.insert(0, str(EXAMPLE.parent))
runpy.run_path(str(EXAMPLE), run_name="__main__")
