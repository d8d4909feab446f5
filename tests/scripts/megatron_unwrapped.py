"""Runs pretrain_gpt.py of the checkout on the path with Megatron-LM's own ``parse_args``: it has to have the flag."""

from __future__ import annotations

import runpy
from importlib.util import find_spec

from megatron.training import arguments

arguments.parse_args = arguments.parse_args.__wrapped__
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
