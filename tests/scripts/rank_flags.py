"""Runs a script on every rank, with more flags on one of them: rank_flags.py RANK "FLAGS" SCRIPT FLAGS..."""

from __future__ import annotations

import os
import runpy
import sys

rank, more, script, *flags = sys.argv[1:]
sys.argv = [script, *flags, *(more.split() if os.environ["RANK"] == rank else [])]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
