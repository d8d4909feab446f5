"""Every flag and every key that users can set, and every name that scripts may import: a new one, or one less, is a
decision, and is made by changing ``option_surface.txt``::

    python -m tests.unit.test_option_surface > tests/unit/option_surface.txt
"""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

import flashrecovery
from flashrecovery.cli.main import cli
from flashrecovery.config import RunConfig
from fr_deepspeed.config import FlashRecoveryConfig
from fr_megatron.lm import arguments

FROZEN = Path(__file__).with_name("option_surface.txt")


def _flags(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _flags(found, f"{path} {name}")
        return
    for parameter in command.params:
        yield f"{path}: {'/'.join(sorted([*parameter.opts, *parameter.secondary_opts]))}"


def _keys(model: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        yield f"{path}.{name}"
        for each in inner:
            yield from _keys(each, f"{path}.{name}")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


def _megatron() -> Iterator[str]:
    parser = argparse.ArgumentParser(add_help=False)
    arguments._add(parser)  # type: ignore[arg-type]
    for action in parser._actions:
        yield f"Megatron-LM: {'/'.join(action.option_strings)}"


def _api() -> Iterator[str]:
    for name in flashrecovery.__all__:
        found = getattr(flashrecovery, name)
        if inspect.isclass(found):
            for method, value in vars(found).items():
                if not method.startswith("_") and isinstance(value, (types.FunctionType, property)):
                    names = inspect.signature(value).parameters if isinstance(value, types.FunctionType) else ()
                    yield f"flashrecovery.{name}.{method}({', '.join(n for n in names if n != 'self')})"
        elif callable(found):
            yield f"flashrecovery.{name}({', '.join(inspect.signature(found).parameters)})"
        else:
            yield f"flashrecovery.{name}"


def surface() -> list[str]:
    return [
        *sorted(_flags(cli, "flashrecovery")),
        *sorted(_keys(RunConfig, "config file")),
        *sorted(_keys(FlashRecoveryConfig, "DeepSpeed config.flash_recovery")),
        *sorted(_megatron()),
        *sorted(_api()),
    ]


def test_the_options_are_those_that_were_decided_on() -> None:
    assert surface() == FROZEN.read_text().splitlines()


if __name__ == "__main__":
    print(*surface(), sep="\n")
