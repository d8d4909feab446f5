"""What must always hold is asserted where it is kept (docs/architecture.md): each assertion is broken once here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashrecovery.plan.membership.quorum import Quorum
from flashrecovery.runtime.page import Page
from flashrecovery.worker.control.gate import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    page = Page.create("gate")
    yield Gate(page)
    page.close()


def test_a_version_is_made_of_the_one_before(gate: Gate) -> None:
    gate.resume(4, 1)
    gate.begin()
    gate.mutate()
    gate.placed(4)
    gate._version = 5
    with pytest.raises(AssertionError, match="version 6 is made of version 4"):
        gate.commit()


def test_a_worker_does_not_go_back_to_an_older_generation(gate: Gate) -> None:
    gate.resume(4, 3)
    with pytest.raises(AssertionError, match="generation 2 after generation 3"):
        gate.resume(4, 2)


def test_terms_only_grow() -> None:
    quorum = Quorum("a", term=2)
    quorum.renewed(3)
    with pytest.raises(AssertionError, match="term 3 after term 3"):
        quorum.renewed(3)
