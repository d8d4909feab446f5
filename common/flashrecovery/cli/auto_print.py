"""``flashrecovery run --auto=print``: the patch that protects a script by hand, on stdout; all else is on stderr."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from flashrecovery.config import PATCH_ENV, RunConfig
from flashrecovery.rpc.quiet_grpc import import_grpc
from flashrecovery.runtime import early_signals
from flashrecovery.terminal import say


def print_patch(config: RunConfig, command: list[str]) -> int:
    """Run the script up to its first step. Returns the exit code."""
    early_signals.hold()
    import_grpc()
    from flashrecovery.job import run_job

    up_to_step = config.model_copy(update={"standby": 0, "max_restarts": 0, "inject": (), "resume": False})
    shown = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with tempfile.TemporaryDirectory(prefix="flashrecovery-") as folder:
        file = Path(folder) / "auto.patch"
        os.environ[PATCH_ENV] = str(file)
        code, reason = asyncio.run(run_job(up_to_step, command, config.run_dir or Path(folder) / "run"))
        text = file.read_text(encoding="utf-8") if code == 0 and file.exists() else ""
    if code != 0:
        say(reason)
        return code
    if not text:
        say("no patch: the script ended without an optimizer step")
        return 1
    with os.fdopen(shown, "w", encoding="utf-8") as stdout:
        stdout.write(text)
    say(
        "nothing was changed; apply it with `patch -p1` (or `git apply`) in this folder, and start the script without "
        "--auto"
    )
    return 0
