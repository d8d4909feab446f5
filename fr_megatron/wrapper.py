"""What the class around the model chunks decides: which rank has which piece of a parameter, what an interrupted step
leaves.

==================================  ================================================================================
``DistributedDataParallel``         :mod:`.buckets`: whole parameters on every data-parallel rank
``TorchFullyShardedDataParallel``   :mod:`.fsdp2`: rows of every parameter
``FullyShardedDataParallel``        :mod:`.megatron_fsdp`: ranges of flat buffers
==================================  ================================================================================

The last two are :class:`OnMesh`: their parameters are DTensors, and the placements say which rank has what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter import ParamRecord, ParamShard, Shard, constant, placed_on_mesh
from fr_megatron.layout import ShardedParameters
from fr_megatron.optimizers import SteppedPair

FaultPoint = Callable[[Callable[[], None]], None]


class Wrapper(ABC):
    """The wrapper of all model chunks of this rank, which are wrapped alike."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = chunks
        self._parameters = list(nn.ModuleList(chunks).parameters())  # now: Megatron-FSDP shows others during a step

    def sharded_for(self, sharded: ShardedParameters, *, expert: bool) -> None:  # noqa: B027 - optional
        """The state of the dense parameters, or of the experts, is sharded otherwise now."""

    @abstractmethod
    def stepped(self, pair: SteppedPair) -> ParamRecord:
        """What an optimizer steps on for a parameter, with its name and holders."""

    @abstractmethod
    def kept(self, parameter: nn.Parameter) -> ParamRecord:
        """A parameter of the chunks itself."""

    def weights(self) -> Iterator[Shard]:
        """Shards of what else is state: not stepped on, and not made without communication from what is."""
        return iter(())

    def frozen(self) -> Iterator[Shard]:
        """Parameters that no optimizer trains. A replacement's script need not initialise them as the first launch."""
        for parameter in self._parameters:
            if not parameter.requires_grad:
                yield ParamShard(self.kept(parameter), {})

    def computing(self) -> Sequence[nn.Parameter]:
        """What the chunks compute with, if it is the same tensors all the time."""
        return self._parameters

    @abstractmethod
    def reset(self, inner: Sequence[Any]) -> None:
        """Set everything back to the state between two steps. ``inner``: Megatron's optimizers. No communication."""

    def before_reduction(self, callback: Callable[[], None]) -> bool:
        """Call ``callback`` whenever a part of the gradient reduction is about to begin. False if this wrapper cannot
        tell when."""
        return False

    def flags(self) -> Any:
        """Flags that a script may have switched, equal on all ranks."""
        return None

    def set_flags(self, flags: Any) -> None:  # noqa: B027 - optional
        """Adopt what :meth:`flags` returned on some rank."""

    @abstractmethod
    def gathering(self, inner: Sequence[Any], optimizer: Optimizer) -> FaultPoint | None:
        """Where fault injection strikes at the all-gather of the parameters; None if there is none."""


class OnMesh(Wrapper):
    """Every parameter is cut over the data-parallel ranks, and so is what is stepped on for it, in the same way."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        super().__init__(chunks)
        self._names = {
            id(parameter): f"{index}.{name}"
            for index, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }

    def stepped(self, pair: SteppedPair) -> ParamRecord:
        parameter, stepped = pair
        assert isinstance(parameter, DTensor)
        fqn = self._names[id(parameter)]
        name, holders = placed_on_mesh(fqn, parameter.device_mesh, parameter.placements)
        return ParamRecord(fqn, name, holders, constant(stepped))

    def kept(self, parameter: nn.Parameter) -> ParamRecord:
        return self.stepped((parameter, parameter))
