"""What a ZeRO-3 engine learns in forward passes: which parameters a module reads that belong to another one (LoRA's
adapters, tied weights, a weight that another module returns).

DeepSpeed notes such a parameter where it is first read, and gathers it with the reading module's own from then on, and
in its backward pass. A process that has not learned it gathers in another order than its peers: of two parameters of
one size it gets a mixture. So it is part of a version.

The trace of the modules, from which parameters are fetched ahead, is learned, too. It is dropped on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from flashrecovery.errors import RestoreError, UnsupportedError

_NONE: Mapping[int, nn.Parameter] = MappingProxyType({})


class ExternalParameters:
    """Which parameters the modules below ``root`` read of others. The modules are those that there are at the first
    capture, before the first step."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._number: dict[int, int] = {}

    def capture(self) -> dict[str, Any]:
        """``{"modules": how many, "read": [(a module's number, its external parameters' numbers)], "returned": numbers
        of the parameters that a module has returned}``; the same on all ranks, which gather together.

        Raises UnsupportedError if a module reads a parameter that is none of the engine's."""
        self._find_places()
        read = [(i, [self._number_of(p) for p in known.values()]) for i, known in enumerate(self._known()) if known]
        returned = [i for i, p in enumerate(self._parameters) if getattr(p, "is_external_param", False)]
        return {"modules": len(self._modules), "read": read, "returned": returned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Know what another rank has known, and no more. Raises RestoreError if it had another model."""
        from deepspeed.runtime.zero.partition_parameters import register_external_parameter

        self._find_places()
        if state["modules"] != len(self._modules):
            raise RestoreError(
                f"the model has {len(self._modules)} modules, that of the other ranks has {state['modules']}"
            )
        for known in self._known():
            if isinstance(known, dict):
                known.clear()
        for i, numbers in state["read"]:
            for number in numbers:
                register_external_parameter(self._modules[i], self._parameters[number])
        returned = frozenset(state["returned"])
        for number, parameter in enumerate(self._parameters):
            parameter.is_external_param = number in returned  # type: ignore[attr-defined]

    def _known(self) -> list[Mapping[int, nn.Parameter]]:
        """DeepSpeed's records for each module: parameters by their ``id()``."""
        return [vars(module).get("_external_params", _NONE) for module in self._modules]

    def _find_places(self) -> None:
        if not self._modules:
            self._modules = list(self._root.modules())
            self._parameters = list(self._root.parameters())
            self._number = {id(parameter): number for number, parameter in enumerate(self._parameters)}

    def _number_of(self, parameter: nn.Parameter) -> int:
        number = self._number.get(id(parameter))
        if number is None:
            raise UnsupportedError(
                "flash_recovery does not support: ZeRO-3 where a module of the engine reads a parameter (of the shape "
                f"{tuple(getattr(parameter, 'ds_shape', parameter.shape))}) that is not the engine's: give it to "
                "deepspeed.initialize() as a part of the model"
            )
        return number
