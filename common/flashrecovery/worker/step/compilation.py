"""Publishes in the page while torch.compile works: a hang has another deadline there (``timeouts.hang_first_step_s``).

Dynamo counts what it does at once, in all threads (a backward graph may be compiled in autograd's), and calls its
handler when the first begins and when the last has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from flashrecovery.capabilities.of_torch import COMPILATIONS
from flashrecovery.runtime.page import Page
from flashrecovery.util.import_hooks import install

_MODULE = "torch._dynamo.callback"


def watch(page: Page) -> None:
    """From now on, also if Dynamo is not imported yet. Its ``reset()`` does not end this."""

    def hook(module: ModuleType) -> None:
        if COMPILATIONS.way is not None:
            handler = module.CompilationCallbackHandler
            handler.run_start_callbacks = _telling(handler.run_start_callbacks, page, compiles=True)
            handler.run_end_callbacks = _telling(handler.run_end_callbacks, page, compiles=False)

    install({_MODULE: hook})


def _telling(real: Callable[..., None], page: Page, *, compiles: bool) -> Callable[..., None]:
    @wraps(real)
    def run(*arguments: Any, **options: Any) -> None:
        if not page.closed:
            page.set_compiles(compiles)
        real(*arguments, **options)

    return run
