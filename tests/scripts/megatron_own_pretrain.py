"""pretrain_gpt.py of the checkout on the path, if it called ``fr_megatron.pretrain`` in place of Megatron's."""

from __future__ import annotations

import runpy
from importlib.util import find_spec

import megatron.training

import fr_megatron

megatron.training.pretrain = fr_megatron.pretrain
spec = find_spec("pretrain_gpt")
assert spec is not None and spec.origin is not None
runpy.run_path(spec.origin, run_name="__main__")
