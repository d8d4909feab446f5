"""Megatron-LM's flags, with whatever checkout is on the path; prints which of our packages have been imported.

python megatron_flag.py [--wrapped] [--not-installed] [--script SCRIPT | --parse] FLAGS...
"""

from __future__ import annotations

import runpy
import sys

flags = sys.argv[1:]
wrapped, missing, parse = (name in flags for name in ("--wrapped", "--not-installed", "--parse"))
script = flags[flags.index("--script") + 1] if "--script" in flags else ""
own = {"--wrapped", "--not-installed", "--parse", "--script", script}
sys.argv = [script, *(f for f in flags if f not in own)]
if missing:
    sys.modules["fr_megatron"] = None  # type: ignore[assignment]
if wrapped:
    from flashrecovery.worker.startup.import_time_hooks import install_adapter_hooks

    install_adapter_hooks()
try:
    if parse:
        from megatron.training.arguments import parse_args

        print(f"flag: {parse_args().flash_recovery}")
    else:
        runpy.run_path(script, run_name="__main__")
finally:
    ours = sorted({m.partition(".")[0] for m in sys.modules} & {"flashrecovery", "fr_megatron", "fr_deepspeed"})
    print(f"imported: {ours}", flush=True)
