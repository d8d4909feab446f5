"""``accelerate launch`` and its configuration file, in options and variables of ``flashrecovery run``.

What they mean is asked of accelerate itself, in a separate process (:mod:`.accelerate_launch`): it imports torch,
which the agent never does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flashrecovery.errors import ConfigError
from flashrecovery.launchers.launch import Understood

ANSWER_ENV = "FLASHRECOVERY_ANSWER_FD"
"""The file descriptor to which the answer is written, as JSON."""


def understood(arguments: Sequence[str]) -> Understood:
    """What ``accelerate launch ARGUMENTS`` is to do. Raises ConfigError."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "flashrecovery.launchers.accelerate_launch", *arguments]
    with open(reading, "rb") as answers:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, ANSWER_ENV: str(writing)},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)
        text = answers.read()
    if process.wait() != 0 or not text:
        raise ConfigError(f"accelerate launch {' '.join(arguments)}: it is refused by accelerate itself, see above")
    answer = json.loads(text)
    if "error" in answer:
        raise ConfigError(f"accelerate launch: {answer['error']}")
    return Understood(answer["options"], tuple(answer["words"]), answer["environment"], tuple(answer["notices"]))


def with_config(file: Path, words: Sequence[str], *, module: bool) -> Understood:
    """The script ``words`` with the configuration ``file``. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(f"--accelerate-config {file}: there is no such file")
    return understood(["--config_file", str(file), *(["--module"] if module else []), *words])
