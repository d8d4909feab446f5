"""The parts of the adapter contract: what each asks for, and what the core makes of an adapter that declares less."""

import re
from inspect import isabstract, isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrecovery.contract import roles
from flashrecovery.contract.adapter import Adapter, InspectableAdapter
from flashrecovery.contract.elastic_adapter import ElasticAdapter
from flashrecovery.contract.loop_adapter import LoopAdapter
from flashrecovery.contract.relayout_adapter import RelayoutAdapter
from flashrecovery.errors import RegistrationError, UnsupportedError
from flashrecovery.worker.registry import Registry
from flashrecovery.worker.reshard.elastic_checks import _refuse_tied
from tests.support.adapters import AdapterStandIn

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"
PARTS = (Adapter, InspectableAdapter, ElasticAdapter, RelayoutAdapter)


def _methods(part: type) -> set[str]:
    return {name for name, value in vars(part).items() if isfunction(value)}


def _never(*_: object) -> Any:
    raise AssertionError


def example(trainer: object) -> Adapter:
    """The minimal adapter of docs/adapters.md."""
    (code,) = re.findall(r"```python\n(.*?class MyAdapter.*?)```", DOCS.read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # our own documentation
    made: Adapter = names["MyAdapter"](trainer)
    return made


def test_a_plain_recovery_needs_nine_methods_four_of_them_abstract() -> None:
    assert len(_methods(Adapter)) == 9 and len(Adapter.__abstractmethods__) == 4
    found = [name for part in PARTS for name in _methods(part)]
    assert len(found) == len(set(found)) and "makes_any_call_again" not in found
    text = DOCS.read_text()
    assert [name for name in found if not re.search(rf"`{name}\b", text)] == []


def test_all_parts_but_the_first_have_defaults() -> None:
    class Everything(AdapterStandIn, RelayoutAdapter): ...

    assert not isabstract(Everything) and isabstract(ElasticAdapter)
    adapters: list[Adapter] = [Everything("one")]
    assert roles.tied_to_size(adapters) == [] and roles.shard_layouts(adapters) == {}
    assert not roles.in_any_layout(adapters[0]) and roles.logical(adapters[0]) is None
    assert roles.touch_mark(adapters[0]) is None


def test_the_minimal_adapter_of_the_documentation_is_one() -> None:
    trainer = SimpleNamespace(tensors={"weights": torch.zeros(2)}, drop_gradients=lambda: None)
    made = example(trainer)
    made.watch(SimpleNamespace(sealed=1, synchronising=2, mutating=3, mutated=4))  # type: ignore[arg-type]
    made.reset()
    assert [shard.name for shard in made.shards()] == ["weights"] and trainer.before_update == 3
    registry = Registry(0, 1, _never, _never)
    registry.register_adapter(made, {})
    registry.close()
    registry.look_closely(True)
    assert registry.checkpoint_format() is None and registry.replicas() is None and registry.silent() == []
    assert registry.known() == [] and registry.rules() == () and roles.touch_mark(made) is None


def test_an_elastic_job_refuses_an_adapter_that_is_not_elastic_by_name() -> None:
    registry = Registry(0, 2, _never, _never)
    registry.adapters = [AdapterStandIn("able"), example(None)]
    with pytest.raises(UnsupportedError, match="with myframework, which is no ElasticAdapter: depends on"):
        _refuse_tied(registry)


def test_shard_layouts_have_the_numbers_of_their_adapters() -> None:
    adapters = [
        example(None),
        AdapterStandIn(shard_layout=lambda: None),
        AdapterStandIn(shard_layout=lambda: "sharded"),
    ]
    assert roles.shard_layouts(adapters) == {2: "sharded"}


def test_only_loops_make_calls_again() -> None:
    loop = LoopAdapter(SimpleNamespace())  # type: ignore[arg-type]
    assert not roles.make_any_call_again([example(None), loop])
    loop.makes_any_call_again = lambda: True  # type: ignore[method-assign]
    assert roles.make_any_call_again([example(None), loop])


def test_an_adapter_of_before_the_first_release_is_refused_with_the_new_name() -> None:
    """Its method would never be called, and what it has to say would be missed without a word."""

    class Old(AdapterStandIn):
        def capsule_mark(self) -> int:
            return 1

    registry = Registry(0, 1, _never, _never)
    with pytest.raises(RegistrationError, match=r"capsule_mark\(\) is called local_state_mark\(\) now"):
        registry.register_adapter(Old(), {})
