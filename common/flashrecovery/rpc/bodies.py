"""For a ``match`` over the bodies of a message."""

from __future__ import annotations

from typing import NoReturn


def no_handler(body: NoReturn) -> NoReturn:
    """The last case: the type checker finds the bodies that no other one takes."""
    raise AssertionError(f"no handler for {body}")
