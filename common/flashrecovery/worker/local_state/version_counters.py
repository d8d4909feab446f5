"""What is looked at several times in every step, through the compiled backend where it is loaded.

After a forward pass nothing of the interpreter is left in the processor's caches: a look that takes 10 us in a loop
takes 100 us in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashrecovery.groups.native_build import loaded
from flashrecovery.state.exact import exact_contiguous
from flashrecovery.state.shard import Structure


def glance_at_random(python_address: int, numpy_address: int) -> tuple[bytes, bytes, bytes] | None:
    """A few words of torch's, Python's and numpy's global stream each, which change whenever it is drawn from; None if
    that cannot be found out so cheaply.

    The addresses are those of the Mersenne Twisters of ``random`` and ``numpy.random``; 0 if numpy's is not loaded.
    """
    module = loaded()
    if module is None:
        return None
    words: tuple[bytes, bytes, bytes] = module.glance_at_random(python_address, numpy_address)
    return words


def count_gradients(parameters: Sequence[torch.Tensor]) -> int:
    """How many of ``parameters`` have a gradient."""
    module = loaded()
    if module is None:
        return sum(p.grad is not None for p in parameters)
    return int(module.count_gradients(parameters))


def glance_at_tensors(tensors: Sequence[torch.Tensor | None], compared: int) -> int:
    """A number that changes when one of ``tensors`` is exchanged or changed.

    Args:
        compared: tensors in host memory of at most this size (bytes) are compared by content. Of others a change is
            seen by the version counter, which kernels that write behind autograd's back do not advance.
    """
    present = [t for t in tensors if t is not None]
    module = loaded()
    if module is not None:
        return hash((len(tensors), int(module.glance_at_tensors(present, compared))))
    looked = [
        (
            id(t),
            t._cdata,  # swap_tensors() gives it another one
            0 if t.is_inference() else t._version,
            exact_contiguous(t).view(-1).view(torch.uint8).numpy().tobytes()
            if t.device.type == "cpu" and t.nbytes <= compared and t.numel()
            else b"",
        )
        for t in present
    ]
    return hash((len(tensors), tuple(looked)))


class TensorTable:
    """The version counters of ``tensors``, looked at again and again: made once, so that a look is one pass in C++."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._native: Any = None

    def digest(self) -> int:
        """Another number when one of the tensors has been written to. Equal only to what this table gave before."""
        module = loaded()
        if module is None:
            return glance_at_tensors(self.tensors, 0)
        if self._native is None:
            self._native = module.tensor_table(self.tensors)
        return int(module.tensors_digest(self._native))


class ItemTable:
    """Values in dictionaries, and the lengths of others.

    Args:
        items: (dictionary, key). The values are compared by identity.
        sized: dictionaries of which only the number of entries counts.
        numbers: values other than numbers, texts and None are all alike, and are not kept from being freed.
    """

    def __init__(
        self,
        items: Sequence[tuple[dict[str, Any], str]],
        sized: Sequence[Mapping[str, Any]],
        *,
        numbers: bool = False,
    ) -> None:
        self._items, self._sized, self._numbers = list(items), list(sized), numbers
        self._native: Any = None

    def changed(self) -> bool:
        """Whether anything may have changed since the last call; always True at the first one, and without the compiled
        backend."""
        module = loaded()
        if module is None:
            return True
        if self._native is None:
            self._native = module.item_table(self._items, self._sized, self._numbers)
        return bool(module.items_changed(self._native))


class BufferTable:
    """Tensors in dictionaries, which may come and go. ``places``: (dictionary, key)."""

    def __init__(self, places: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        self._places = list(places)
        self._plain = all(isinstance(buffers, dict) for buffers, _ in self._places)
        self._native: Any = None

    def digest(self, compared: int) -> int:
        """See :func:`glance_at_tensors`."""
        module = loaded()
        if module is None or not self._plain:
            return glance_at_tensors([buffers.get(name) for buffers, name in self._places], compared)
        if self._native is None:
            self._native = module.item_table(self._places, [], False)
        return int(module.items_tensors(self._native, compared))


class StructureTable:
    """The structure of some shards. It is made when they have just been looked up, and holds them."""

    def __init__(self, structures: Sequence[Structure]) -> None:
        states = {id(state): state for one in structures for state in one.states}
        self._attributes = [attribute for one in structures for attribute in one.attributes]
        self._states, self._tensors = [*states.values()], [pair for one in structures for pair in one.tensors]
        module = loaded()
        self._native: Any = (
            None if module is None else module.structure_table(self._attributes, self._states, self._tensors)
        )

    def same(self) -> bool:
        """Whether a look would find the same tensors in the same memory. False without the compiled backend."""
        module = loaded()
        return module is not None and self._native is not None and bool(module.structure_same(self._native))


def counter_watch(tensors: Sequence[torch.Tensor]) -> Callable[[], int]:
    """Gives another number when one of the tensors has been written to."""
    return TensorTable(tensors).digest


def structure_watch(structures: Sequence[Structure]) -> Callable[[], bool]:
    """See :meth:`StructureTable.same`."""
    return StructureTable(structures).same


class AttributeOf:
    """Gives an attribute, which is always a parameter and may become another one."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self) -> Any:
        return getattr(self.owner, self.name)


class Constant:
    """Gives always the same parameter."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter

    def __call__(self) -> torch.nn.Parameter:
        return self.parameter


class ParameterTable:
    """Parameters that are looked up again at each check.

    Args:
        gets: each returns one parameter. :class:`AttributeOf` and :class:`Constant` are evaluated without Python.
    """

    def __init__(self, gets: Sequence[Callable[[], torch.nn.Parameter]]) -> None:
        self._gets = list(gets)
        self._plain = all(isinstance(get, (AttributeOf, Constant)) for get in self._gets)
        self._native: Any = None

    def parameters(self) -> list[torch.nn.Parameter]:
        return [get() for get in self._gets]

    def trained(self) -> bytes:
        """One byte each: 1 if it requires a gradient, else 0."""
        module = self._module()
        if module is None:
            return bytes(parameter.requires_grad for parameter in self.parameters())
        found: bytes = module.parameters_flags(self._native)
        return found

    def trained_mark(self, *, again: bool = False) -> int:
        """A number that is equal where :meth:`trained` is. ``again``: of the parameters that were found last, which
        saves a look whether they are others now; that may be made nevertheless."""
        module = self._module()
        return hash(self.trained()) if module is None else int(module.parameters_trained(self._native, again))

    def gradients(self) -> int:
        """How many have a gradient."""
        module = self._module()
        if module is None:
            return count_gradients(self.parameters())
        return int(module.parameters_with_gradients(self._native))

    def _module(self) -> Any | None:
        module = loaded() if self._plain else None
        if module is not None and self._native is None:
            self._native = module.parameter_table(
                [(g.owner, g.name) if isinstance(g, AttributeOf) else g() for g in self._gets]
            )
        return module
