"""What is to be started, once all spellings have been understood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]
"""Options of ``flashrecovery run`` that were given, by the names of their parameters, and as they were written."""


@dataclass(frozen=True)
class Understood:
    """What another launcher's command line, or file, says.

    Attributes:
        options: the same in options of ``flashrecovery run``.
        words: what is to be trained with: ``script.py ARGS`` (or ``module ARGS``, where ``options["module"]`` is true).
        environment: variables for all ranks.
        notices: sentences for the user, about what has no meaning here.
    """

    options: Options
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
