"""``python -m tests.simulation --seeds 1000``: search for a history that breaks a law; ``--seed N`` shows one."""

from __future__ import annotations

import sys

from tests.simulation.search import main

if __name__ == "__main__":
    sys.exit(main())
