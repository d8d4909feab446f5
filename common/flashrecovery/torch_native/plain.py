"""A module without a data-parallel wrapper: the script synchronises gradients itself, or there is one rank; and modules
that are not trained, such as an average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from flashrecovery.adapter import ParamRecord, StepHooks, TorchAdapter, constant, placed_on_mesh, replicated, world_size
from flashrecovery.adapter.elastic import ElasticAdapter


class PlainAdapter(TorchAdapter, ElasticAdapter):
    """Protects a plain module. Its parameters are taken to be equal on all ranks; DTensors say where they lie."""

    name = "plain"

    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        records = []
        for fqn, parameter in self.inner.named_parameters():
            if isinstance(parameter, DTensor):
                name, holders = placed_on_mesh(fqn, parameter.device_mesh, parameter.placements)
            else:
                name, holders = replicated(fqn, range(world_size()))
            records.append(ParamRecord(fqn, name, holders, constant(parameter)))
        return tuple(records)

    def sync_spans_world(self) -> bool:
        return False


class ModuleAdapter(PlainAdapter):
    """Protects a module that is registered by name, such as an average of the weights: its parameters, which are taken
    to be equal on all ranks, and its buffers. It takes no part in the step."""

    name = "module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, ())

    def watch(self, hooks: StepHooks) -> None:
        """Nothing that is called in it says where a step is."""

    def sync_spans_world(self) -> bool:
        return True  # the model's adapter says what is so

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        return {}
