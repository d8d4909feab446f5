"""A framework's own ways to change shards from outside: DeepSpeed's ``safe_set_full_fp32_param`` and its like,
``reload_model_params`` of Megatron's optimizers.

They write through ``.data``, which moves no version counter. The methods that they come through are counted instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

Method = tuple[Any, str]
"""An object, and the name of its method."""


class Setters:
    """Counts the calls of ``methods`` from now on. An object may lack one."""

    def __init__(self, methods: Iterable[Method] = ()) -> None:
        self.calls = 0
        for owner, name in methods:
            if hasattr(owner, name):
                setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return method(*args, **kwargs)

        return counted
