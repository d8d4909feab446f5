"""Plain state survives the codec; anything else is refused by name; bytes from outside cannot run code."""

from __future__ import annotations

import collections
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrecovery.errors import ProtocolError, UnsupportedError
from flashrecovery.state import codec


def back(value: Any) -> Any:
    return codec.loads(codec.dumps(value))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(st.text(), inner),
        st.tuples(inner, inner),
        st.sets(st.integers()),
        st.frozensets(st.text()),
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_equal(value: Any) -> None:
    assert back(value) == value
    assert type(back(value)) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"ab"),
        range(1, 9, 2),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter("abca"),
        collections.deque([1, 2], maxlen=3),
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda", 3),
        torch.Size([2, 3]),
        np.float64(1.5),
        np.int32(-4),
        np.bool_(True),
        np.str_("x"),
        random.getstate(),
    ],
)
def test_other_allowed_types(value: Any) -> None:
    assert back(value) == value
    assert type(back(value)) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.tensor(7),
        torch.empty(0, 5),
        torch.randn(4).to(torch.bfloat16),
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64),
        torch.ones(2, requires_grad=True),
        torch.get_rng_state(),
    ],
)
def test_tensors(tensor: torch.Tensor) -> None:
    got = back({"t": tensor})["t"]
    assert got.dtype == tensor.dtype and got.shape == tensor.shape and got.requires_grad == tensor.requires_grad
    assert codec.dumps(got) == codec.dumps(tensor)
    got.detach().zero_()  # writable, and not the original's memory


def test_numpy_arrays() -> None:
    state = np.random.default_rng(3).bit_generator.state
    assert back(state) == state
    array = np.arange(6).reshape(2, 3).T
    np.testing.assert_array_equal(back(array), array)
    assert back(np.random.get_state())[1].tolist() == np.random.get_state()[1].tolist()  # type: ignore[index]


def test_only_values_count() -> None:
    """Which equal values are one object must not change the bytes: encoded states are compared by digest."""
    betas = (0.9, 0.999)
    assert codec.dumps([betas, betas]) == codec.dumps([(0.9, 0.999), (0.9, float("0.999"))])
    state = {"a": "x" * 50, "b": [1, 2, {"x" * 50: None}]}
    assert codec.dumps(back(state)) == codec.dumps(state)


class Strange:
    pass


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"a": [1, {"b": Strange()}]}, ["Strange", "['a'][1]['b']"]),
        (print, ["print"]),
        (int, ["int"]),
        (torch.nn.Parameter(torch.ones(1)), ["Parameter"]),
        ([torch.ones(2).to_sparse()], ["sparse", "[0]"]),
        (torch.empty(2, device="meta"), ["meta"]),
        (np.array([object()]), ["dtype object"]),
        (collections.defaultdict(list), ["defaultdict"]),
        (random.Random(1), ["Random"]),
    ],
)
def test_what_is_not_plain_is_refused_by_name(value: Any, names: list[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        codec.dumps(value)
    for name in names:
        assert name in str(caught.value)


def test_dtensor_is_refused() -> None:
    from torch.distributed.tensor import DTensor

    fake = DTensor.__new__(DTensor, torch.ones(1), _spec(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="DTensor"):
        codec.dumps([fake])


def _spec() -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(None, (), TensorMeta(torch.Size([1]), (1,), torch.float32))  # type: ignore[arg-type]


def test_cycles_and_depth_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    for value in (cycle, deep):
        with pytest.raises(UnsupportedError, match=r"nested too deeply"):
            codec.dumps(value)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit(1)",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps(Strange()),
        b"",
        b"garbage",
        codec.dumps([torch.ones(9)])[:-9],
        pickle.dumps(getattr),
        b"\x96" + (1 << 56).to_bytes(8, "little"),  # a bytearray of that many bytes
        b"\x96" + (1 << 33).to_bytes(8, "little") + b"ab.",
        b"Nr" + (1 << 29).to_bytes(4, "little") + b".",  # None, remembered under so high a number
    ],
)
def test_foreign_or_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.loads(data)


@given(st.binary(max_size=200))
def test_any_bytes_either_load_or_are_refused(data: bytes) -> None:
    try:
        codec.loads(data)
    except ProtocolError:
        pass


def test_checkpoints_that_name_the_codecs_former_place_are_read() -> None:
    value = {"tensor": torch.arange(3), "dtype": torch.bfloat16, "array": np.arange(2)}
    data = codec.dumps(value)
    former = _renamed(data, b"flashrecovery.state.codec", b"flashrecovery.worker.codec")
    loaded = codec.loads(former)
    assert former != data and torch.equal(loaded["tensor"], value["tensor"]) and loaded["dtype"] is torch.bfloat16


def _renamed(data: bytes, old: bytes, new: bytes) -> bytes:
    """In a pickle of protocol 5: a short string has one byte of length before it, and its own frame eight."""
    renamed = data.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)
    assert renamed[2:3] == b"\x95"
    return renamed[:3] + (len(renamed) - 11).to_bytes(8, "little") + renamed[11:]
