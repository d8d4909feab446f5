"""Other launchers' command lines behind ``flashrecovery run``: ``flashrecovery run -- torchrun ARGS`` and the like."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath

from flashrecovery.errors import ConfigError
from flashrecovery.launchers.launch import Understood
from flashrecovery.runtime.environment import LOCAL_RANK_MACRO

_PYTHON = re.compile(r"python[\d.]*")
_SHEBANG = re.compile(rb"#!.*python[\d.]*|#!/bin/sh\n'{3}exec' .*python")
"""Also that of pip where the interpreter's path is long."""
_PROGRAMS = {
    "torchrun": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "launch",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_USE_ENV = frozenset({"--use-env", "--use_env"})
Parser = Callable[[Sequence[str]], Understood]


def understood(words: Sequence[str], torchrun: Parser, *, module: bool) -> Understood | None:
    """What another launcher's command line says; None if ``words`` is none.

    Args:
        words: the script and its arguments as they were given to ``flashrecovery run``.
        torchrun: understands torchrun's arguments.
        module: whether the first word is a module's name.

    Raises:
        ConfigError: the launcher's own arguments are wrong, or refused.
    """
    launcher, arguments = _launcher(words, module=module)
    if launcher == "torchrun":
        return torchrun(arguments)
    if launcher == "launch":
        return _with_local_rank(torchrun, arguments)
    if launcher == "accelerate":
        from flashrecovery.launchers import accelerate

        return accelerate.understood(arguments)
    if launcher == "deepspeed":
        from flashrecovery.launchers import deepspeed

        return deepspeed.understood(arguments)
    return None


def _launcher(words: Sequence[str], *, module: bool) -> tuple[str | None, list[str]]:
    """Its name, and its arguments."""
    first, rest = words[0], list(words[1:])
    if module:
        return _MODULES.get(first), rest
    name = PurePath(first).name
    if name == "accelerate" and rest[:1] == ["launch"]:
        return "accelerate", rest[1:]
    if _PYTHON.fullmatch(name):
        program = [word for word in rest if word != "-u"]
        return (_MODULES.get(program[1]), program[2:]) if program[:1] == ["-m"] and program[1:] else (None, [])
    return _PROGRAMS.get(name), rest


def _with_local_rank(torchrun: Parser, arguments: list[str]) -> Understood:
    """``python -m torch.distributed.launch`` tells the script its local rank as its first argument."""
    known = torchrun([word for word in arguments if word not in _USE_ENV])
    if _USE_ENV & {*arguments}:
        return known
    words = (known.words[0], f"--local-rank={LOCAL_RANK_MACRO}", *known.words[1:])
    return Understood(known.options, words)


def python_program(words: Sequence[str], *, required: bool) -> Understood | None:
    """``python script.py ARGS``, or a program that is a Python script (such as those that pip installs).

    Args:
        words: a program and its arguments.
        required: whether anything else is an error (``--no-python``), or none of this function's business.

    Raises:
        ConfigError: the program is none that workers can run, which are Python processes.
    """
    first, rest = words[0], list(words[1:])
    if _PYTHON.fullmatch(PurePath(first).name):
        program = [word for word in rest if word != "-u"]
        if program[:1] == ["-m"] and program[1:]:
            return Understood({"module": True}, tuple(program[1:]))
        if program and not program[0].startswith("-"):
            return Understood({}, tuple(program))
        raise ConfigError(f"{' '.join(words)!r}: allowed: python [-u] SCRIPT ARGS, and python [-u] -m MODULE ARGS")
    if not required:
        return None
    found = shutil.which(first)
    if found is not None and _is_python(Path(found)):
        return Understood({}, (found, *rest))
    raise ConfigError(
        f"--no-python {first!r}: {'no Python program' if found else 'there is no such program'}. A rank is a Python "
        "process of FlashRecovery, which runs the script itself: write the Python script that this program starts, and "
        "set what it sets before `flashrecovery run`"
    )


def _is_python(path: Path) -> bool:
    with open(path, "rb") as file:
        return path.suffix == ".py" or _SHEBANG.match(file.read(512)) is not None
