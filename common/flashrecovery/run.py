"""``python -m flashrecovery.run``: ``flashrecovery run``, as ``python -m torch.distributed.run`` is ``torchrun``."""

from __future__ import annotations

import sys

from flashrecovery.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["run"]
    main()
