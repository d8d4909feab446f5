"""Notices of preemption: a file appears, a command exits with 0, or a device plugin gives a warning.

Clouds and schedulers announce a preemption in many ways; all of them can be adapted to a file or a command. The source
is polled until it has announced the preemption once and the controller has received that.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from flashrecovery.config import NoticeSettings
from flashrecovery.errors import ConfigError

_LATE_S = 10.0
"""A command that takes longer has said nothing."""


def check(settings: NoticeSettings) -> None:
    """Raises ConfigError if the command cannot be run."""
    if settings.command and shutil.which(settings.command[0]) is None:
        raise ConfigError(f"notice.command: {settings.command[0]!r} is not found, or cannot be run")


async def watch(settings: NoticeSettings, warning: Callable[[], str], told: Callable[[str], bool]) -> None:
    """Ask, until ``told`` says that it has taken the notice in; it gets what has been seen. ``warning``: what
    a device plugin has warned of, "" if of nothing."""
    if settings.file is None and not settings.command and not settings.warnings:
        return
    while True:
        seen = await _look(settings, warning)
        if seen and told(seen):
            return
        await asyncio.sleep(settings.poll_s)


async def _look(settings: NoticeSettings, warning: Callable[[], str]) -> str:
    """What has been seen, "" if nothing."""
    if settings.file is not None and _is_there(settings.file):
        return f"the file {settings.file} is there (notice.file)"
    if settings.command and await _succeeds(settings.command):
        return f"{' '.join(settings.command)!r} has ended with 0 (notice.command)"
    if settings.warnings and (text := warning()):
        return f"a device plugin warns: {text} (notice.warnings)"
    return ""


def _is_there(file: Path) -> bool:
    """A file system that does not answer now is asked again."""
    try:
        return file.exists()
    except OSError:
        return False


async def _succeeds(command: list[str]) -> bool:
    quiet = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=quiet, stdout=quiet, stderr=quiet)
    except OSError:
        return False  # it is not there now, or no process can be started
    try:
        return await asyncio.wait_for(process.wait(), _LATE_S) == 0
    except asyncio.TimeoutError:
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
