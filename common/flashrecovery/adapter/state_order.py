"""The order of the entries of ``optimizer.state``, which a script can see: in a norm over all of them, in a saved file.

An entry appears with its parameter's first gradient, so the order is part of the history of a job. It travels with the
shards, as the place of each entry; a replacement, which gets its shards in any order, puts its entries in that order.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer


class StateOrder:
    """The places of one optimizer's entries. Entries only ever come behind those that are there."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._places: dict[torch.Tensor, int] = {}
        self._next = 0
        self._state = optimizer.state
        self._settled = True

    @staticmethod
    def of(optimizer: Optimizer) -> StateOrder:
        """The order of this optimizer's state: one object for all callers, until the optimizer gets other state
        (``load_state_dict``)."""
        order = _ORDERS.get(optimizer)
        if order is None or order._state is not optimizer.state:
            order = _ORDERS[optimizer] = StateOrder(optimizer)
        return order

    def place(self, parameter: torch.Tensor) -> int:
        """The position of a parameter that has state."""
        if parameter not in self._places:
            for found in self._state:
                if found not in self._places:
                    self._places[found], self._next = self._next, self._next + 1
        return self._places[parameter]

    def put(self, parameter: torch.Tensor, place: int) -> None:
        """The parameter has got state whose place is known; :meth:`settle` puts it there."""
        self._places[parameter], self._next = place, max(self._next, place + 1)
        self._settled = False

    def forget(self, parameter: torch.Tensor) -> None:
        """The parameter has lost its state."""
        self._places.pop(parameter, None)
        self._next = max(self._places.values(), default=-1) + 1

    def settle(self) -> None:
        """Bring the entries into the order of their places."""
        if self._settled:
            return
        entries = sorted(self._state.items(), key=lambda entry: self.place(entry[0]))
        self._state.clear()
        self._state.update(entries)
        self._settled = True


def give_up_state(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    """The parameter is none of the optimizer's any more."""
    optimizer.state.pop(parameter, None)
    StateOrder.of(optimizer).forget(parameter)


def hand_over_state(optimizer: Optimizer, parameter: torch.Tensor, state: dict[str, Any], place: int) -> None:
    """The parameter, which is new, gets this state, and its place among the optimizer's entries by
    :func:`settle_state`."""
    if state:
        optimizer.state[parameter] = state
        StateOrder.of(optimizer).put(parameter, place)


def settle_state(optimizer: Optimizer) -> None:
    """All entries that were handed over are brought to their places."""
    StateOrder.of(optimizer).settle()


_ORDERS: WeakKeyDictionary[Optimizer, StateOrder] = WeakKeyDictionary()
