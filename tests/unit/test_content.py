"""What a batch contains: a write anywhere in it is seen, however it was made, and other processes find the same."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flashrecovery.errors import DataSourceError
from flashrecovery.worker.data import worker_digests
from flashrecovery.worker.data.batch_digest import Content, copy_of_structure, device_digest, digests_of_leaves
from flashrecovery.worker.data.stream import DataStream
from flashrecovery.worker.data.worker_digests import leaves_of

LARGE = 300_000
"""Elements: the middle is far from both ends."""


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Sample:
    x: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: Any


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Hidden:
    """Its content is not in ``vars()``."""

    __slots__ = ("__dict__", "x")

    def __init__(self, x: Any) -> None:
        self.x = x


class Encoding(collections.UserDict[str, Any]):
    """As the one of Hugging Face's tokenizers."""


class Named(dict[str, Any]):
    pass


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", [0, LARGE // 2, LARGE - 1])
def test_a_write_that_torch_does_not_count_is_seen(dtype: torch.dtype, where: int) -> None:
    batch = torch.zeros(LARGE, dtype=torch.float32).to(dtype)
    before = Content.of(batch)
    assert before.still_in(batch)
    raw = batch.data.view(torch.uint8).numpy()
    raw[where * dtype.itemsize] ^= 1
    assert not before.still_in(batch)
    raw[where * dtype.itemsize] ^= 1
    assert before.still_in(batch)


def real() -> torch.Tensor:
    return torch.randn(600, 500)


def complex_numbers() -> torch.Tensor:
    return torch.randn(600, 500, dtype=torch.complex64)


VIEWS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (real, lambda t: t.t()),
    "strided": (real, lambda t: t[:, ::2]),
    "offset": (real, lambda t: t[3:]),
    "expanded": (real, lambda t: t[:, None].expand(-1, 2, -1)),
    "no dimension": (lambda: torch.randn(()), lambda t: t),
    "needs a gradient": (lambda: real().requires_grad_(), lambda t: t),
    "conjugate": (complex_numbers, torch.Tensor.conj),
    "negative": (complex_numbers, lambda t: t.conj().imag),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_of_a_tensor(name: str) -> None:
    make, view = VIEWS[name]
    base = make()
    batch = view(base)
    before = Content.of(batch)
    assert before.still_in(batch) and not before.opaque
    base.data.view(-1)[base.numel() // 2 & ~1] += 1 + 1j if base.is_complex() else 1
    assert not before.still_in(batch)


def test_a_sparse_and_a_nested_tensor() -> None:
    sparse = torch.eye(100).to_sparse()
    csr = torch.eye(100).to_sparse_csr()
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(500)], layout=torch.jagged)
    for batch, values in ((sparse, sparse._values()), (csr, csr.values()), (nested, nested.values())):
        before = Content.of(batch)
        assert before.still_in(batch) and not before.opaque
        values.data[50] = 7
        assert not before.still_in(batch)


ARRAYS: dict[str, Callable[[], Any]] = {
    "c order": lambda: np.zeros((600, 500), dtype=np.float32),
    "fortran order": lambda: np.zeros((600, 500), dtype=np.float32, order="F"),
    "gaps": lambda: np.zeros((600, 500), dtype=np.float32)[:, ::3],
    "reversed": lambda: np.zeros((600, 500), dtype=np.float32)[::-1],
    "bool": lambda: np.zeros((600, 500), dtype=bool),
    "dates": lambda: np.zeros((600, 500), dtype="datetime64[s]"),
    "text": lambda: np.zeros((600, 500), dtype="U5"),
    "records": lambda: np.zeros((600, 500), dtype=[("a", "i4"), ("b", "f8")]),
    "objects": lambda: np.zeros((60, 50), dtype=object),
    "any length": lambda: np.full((60, 50), "long", dtype=np.dtypes.StringDType()),
    "masked": lambda: np.ma.zeros((600, 500)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_array(name: str) -> None:
    batch = ARRAYS[name]()
    before = Content.of(batch)
    assert before.still_in(batch) and not before.opaque
    middle = tuple(n // 2 for n in batch.shape)
    batch[middle] = (1, 2.0) if name == "records" else True if name == "bool" else 1
    assert not before.still_in(batch)


def test_a_mask_is_content() -> None:
    batch = np.ma.zeros(9)
    before = Content.of(batch)
    batch[4] = np.ma.masked
    assert not before.still_in(batch)


@pytest.mark.parametrize(
    "make",
    [
        Sample,
        Slotted,
        Plain,
        Hidden,
        lambda x: Pair(1, x),
        lambda x: Encoding(x=x),
        lambda x: Named(x=x),
        lambda x: [[[x]]],
        lambda x: {"a": (x, 1)},
        lambda x: collections.deque([x]),
        lambda x: np.array([x, None], dtype=object),
    ],
)
def test_every_container(make: Callable[[Any], Any]) -> None:
    tensor = torch.zeros(LARGE)
    batch = make(tensor)
    before = Content.of(batch)
    assert before.still_in(batch) and not before.opaque
    tensor.numpy()[LARGE // 2] = 1
    assert not before.still_in(batch)


@pytest.mark.parametrize(
    ("batch", "write"),
    [
        (bytearray(LARGE), lambda b: b.__setitem__(LARGE // 2, 1)),
        ([1, 2, 3], lambda b: b.__setitem__(1, 5)),
        ({"a": "x"}, lambda b: b.update(a="y")),
        ({1, 2}, lambda b: b.add(3)),
        (Named(x=1), lambda b: setattr(b, "extra", 2)),
        (random.Random(1), lambda b: b.random()),
        (torch.Generator().manual_seed(1), lambda b: torch.rand(1, generator=b)),
    ],
)
def test_everything_else(batch: Any, write: Callable[[Any], None]) -> None:
    before = Content.of(batch)
    assert before.still_in(batch) and not before.opaque
    write(batch)
    assert not before.still_in(batch)


def test_a_batch_that_contains_itself() -> None:
    batch: list[Any] = [torch.zeros(3)]
    batch.append(batch)
    before = Content.of(batch)
    assert before.still_in(batch)
    batch[0].numpy()[1] = 4
    assert not before.still_in(batch)


def test_another_process_finds_the_same() -> None:
    """The order of sets and the addresses of objects differ there."""
    code = (
        "import torch; from flashrecovery.worker.data.batch_digest import Content; exec('class Plain: pass')\n"
        "p = Plain(); p.x = torch.arange(9); p.f = object.__init__; p.c = Plain\n"
        "print(Content.of([{'a', 'b', 'c', 'd'}, p, {'k': p}, 1.5, None, torch.Generator().manual_seed(3)]).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1 and len(found.pop()) == 17


# -- on a device ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1001])
def test_every_byte_on_a_device_counts(size: int) -> None:
    raw = torch.randint(0, 255, (size + 1,), dtype=torch.uint8)[1:]  # not aligned
    digests = {int(device_digest(raw))}
    for i in range(size):
        raw[i] += 1
        digests.add(int(device_digest(raw)))
    assert len(digests) == size + 1


def test_a_sign_or_a_swap_on_a_device_counts() -> None:
    x = torch.randn(1000)
    views = [x, -x, x.flip(0), x.roll(2), torch.zeros(1000), torch.zeros(1000).neg()]
    assert len({int(device_digest(v.contiguous().view(torch.uint8))) for v in views}) == len(views)


# -- what cannot be told ----------------------------------------------------------------------------


def test_what_cannot_be_told_is_named_and_read_again(caplog: pytest.LogCaptureFixture) -> None:
    stream = DataStream([[torch.ones(2) * i, threading.Lock()] for i in range(5)])
    stream.commit(0)
    for _ in range(2):
        next(stream)
    assert caplog.text.count("contains a _thread.lock") == 1
    stream.rollback(0)
    assert "read again" in caplog.text
    assert float(next(stream)[0][0]) == 0


def test_what_cannot_be_told_nor_read_again_is_refused_at_once() -> None:
    with pytest.raises(DataSourceError, match=r"contains a _thread\.lock.*one-shot iterator"):
        next(DataStream(iter([[threading.Lock()]])))


# -- in the stream ----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [lambda t: t.numpy().__setitem__(LARGE // 2, 5),
                                   lambda t: t.data.__setitem__(LARGE // 2, 5)], ids=["numpy", "data"])  # fmt: skip
def test_a_batch_written_in_its_middle_is_not_replayed(write: Callable[[torch.Tensor], None]) -> None:
    class Fresh(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((LARGE,), float(index))

    stream = DataStream(torch.utils.data.DataLoader(Fresh(), batch_size=None))
    stream.commit(0)
    write(next(stream))
    stream.rollback(0)
    assert bool((next(stream) == 0).all())
    one_shot = DataStream(torch.full((LARGE,), float(i)) for i in range(4))
    one_shot.commit(0)
    write(next(one_shot))
    with pytest.raises(DataSourceError, match="modified a batch in place"):
        one_shot.rollback(0)


def test_a_step_may_take_items_out_of_a_batch() -> None:
    """``labels = batch.pop("labels")``: also of a generator, which cannot be read again."""
    stream = DataStream(Encoding(x=torch.full((2,), i), pairs=[Pair(i, {"y": i})]) for i in range(3))
    stream.commit(0)
    for _ in range(3):
        batch = next(stream)
        assert batch["pairs"] == [Pair(0, {"y": 0})] and float(batch.pop("x")[0]) == 0
        batch["pairs"].append(1)
        batch["pairs"][0].y.clear()
        stream.rollback(0)


def test_the_copy_of_a_structure_shares_its_tensors() -> None:
    tensor = torch.ones(3)
    batch = {"a": [tensor, (tensor, Pair(tensor, 1))], "b": collections.OrderedDict(c=tensor)}
    copy = copy_of_structure(batch)
    assert copy is not batch and copy["a"] is not batch["a"]
    assert copy["a"][1][1].x is tensor and copy["b"]["c"] is tensor and type(copy["b"]) is collections.OrderedDict


# -- digested by a loader's workers -----------------------------------------------------------------


class Large(torch.utils.data.Dataset[Any]):
    """Samples of which a batch of two has large leaves."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((LARGE,), float(index)), "y": index, "z": (torch.full((LARGE,), index), "text")}


class Changing(torch.Tensor):
    pass


def arrays(samples: Sequence[Any]) -> Any:
    """A batch that no worker changes on its way, and one large tensor of your own class."""
    x = np.stack([sample["x"].numpy() for sample in samples])
    return Pair([x, np.asfortranarray(x)], {"t": torch.from_numpy(x).as_subclass(Changing)})


@pytest.mark.parametrize("collate", [None, arrays], ids=["tensors", "arrays"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loaders_workers_digest_its_batches(collate: Any, persistent: bool) -> None:
    loader: Any = torch.utils.data.DataLoader(
        Large(), batch_size=2, num_workers=2, collate_fn=collate, persistent_workers=persistent
    )
    its_own = loader.collate_fn
    if persistent:
        next(iter(loader))
    stream = DataStream(loader)
    stream.commit(0)
    for number in range(8):  # more than an epoch
        batch = next(stream)
        assert len(leaves_of(stream._iterator)) == (1 if collate else 2) and loader.collate_fn is its_own
        assert stream._kept[-1].content == Content.of(batch) and type(batch) is (Pair if collate else dict)
        stream.commit(number + 1)
    content = Content.of(batch)
    stream.rollback(7)
    assert stream._replay, "nothing was written: the batch is there"
    again = next(stream)
    (again.x[0] if collate else again["x"].numpy())[1, LARGE // 2] += 1
    stream.rollback(7)
    assert not stream._replay, "the source is read again"
    assert Content.of(next(stream)) == content


def test_persistent_workers_that_the_script_has_started_or_uses_itself() -> None:
    for begun_before in (True, False):
        loader: Any = torch.utils.data.DataLoader(Large(), batch_size=2, num_workers=1, persistent_workers=True)
        if begun_before:
            next(iter(loader))
        iterator = worker_digests.begin(loader)
        assert type(next(iterator)) is dict and bool(leaves_of(iterator)) is not begun_before
        assert type(next(iter(loader))) is dict


def test_what_a_worker_says_counts_only_where_it_fits() -> None:
    batch = [torch.zeros(LARGE), {"a": np.zeros(LARGE), "b": torch.zeros(LARGE)}]
    said = digests_of_leaves(batch)
    assert Content.of(batch, said) == Content.of(batch)
    for number in range(3):
        other = [leaf._replace(digest=bytes(16)) if n == number else leaf for n, leaf in enumerate(said)]
        assert Content.of(batch, other) != Content.of(batch), "it is not read again"
        longer = [leaf._replace(nbytes=leaf.nbytes + 1) if n == number else leaf for n, leaf in enumerate(other)]
        assert Content.of(batch, longer) == Content.of(batch, other[:number] + other[number + 1 :]) == Content.of(batch)


class Unpickled:
    """Has code of its own that runs when it comes to another process."""

    def __init__(self) -> None:
        self.x = torch.zeros(LARGE)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.x = state["x"] + 1


def test_what_may_change_on_its_way_is_read_where_it_arrives() -> None:
    noted = torch.zeros(LARGE)
    noted.why = "attributes stay behind"  # type: ignore[attr-defined]
    array = np.zeros((600, 500))
    odd = [
        Unpickled(), Sample(torch.zeros(LARGE)), Named(x=torch.zeros(LARGE)), torch.zeros(LARGE).as_subclass(Changing),
        noted, array.T, array[::2], np.full(LARGE, "x", object), np.ma.zeros(LARGE), torch.eye(600).to_sparse(),
        torch.zeros(10),
    ]  # fmt: skip
    assert not digests_of_leaves(odd)


def test_a_digest_of_an_earlier_version_is_known() -> None:
    """Which digested all of a batch in one."""
    batch = {"x": torch.arange(LARGE), "y": np.arange(LARGE), "z": [1, "text"]}
    before = "d517adf998bae565"
    content = Content.of(batch)
    assert content.digest != before
    assert content.is_called(before, batch) and content.is_called(content.digest, batch)
    batch["y"][5] += 1
    assert not Content.of(batch).is_called(before, batch) and not Content.of(batch).is_called(content.digest, batch)
