"""The ``.bin/.idx`` data set: round trips, the exact bytes of the format, clear errors for broken files."""

from __future__ import annotations

import importlib.util
import multiprocessing
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

import corpus  # noqa: E402
import indexed_dataset as ids  # noqa: E402


def write(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> None:
    """``documents[d][s]`` are the tokens of one sequence."""
    with ids.IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            for sequence in document:
                builder.add_sequence(sequence)
            builder.end_document()
        builder.finalize()


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=4), max_size=5)


@given(documents=DOCUMENTS)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    prefix = tmp_path_factory.mktemp("data") / "set"
    write(prefix, documents)
    dataset = ids.IndexedDataset(prefix)
    sequences = [s for document in documents for s in document]
    assert [list(dataset[i]) for i in range(len(dataset))] == sequences
    bounds = np.cumsum([0] + [len(document) for document in documents])
    assert list(dataset.document_indices) == list(bounds)
    assert list(dataset.tokens) == [t for s in sequences for t in s]


def test_the_files_have_exactly_the_documented_bytes(tmp_path: Path) -> None:
    write(tmp_path / "set", [[[1, 2, 3]], [[4], [5, 6]]], np.int32)
    assert (tmp_path / "set.bin").read_bytes() == struct.pack("<6i", 1, 2, 3, 4, 5, 6)
    assert (tmp_path / "set.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 4, 3, 3)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 12, 16)
        + struct.pack("<3q", 0, 1, 3)
    )


def test_parts_of_a_sequence(tmp_path: Path) -> None:
    write(tmp_path / "set", [[[10, 11, 12, 13]], [[20]]])
    dataset = ids.IndexedDataset(tmp_path / "set")
    assert list(dataset.get(0, 1)) == [11, 12, 13]
    assert list(dataset.get(0, 1, 2)) == [11, 12]
    assert list(dataset.get(0, 4)) == []
    assert list(dataset[-1]) == [20]
    for arguments in ((2,), (-3,), (0, -1), (0, 0, 5), (1, 0, 2), (0, 5)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)


def test_it_travels_to_loader_processes_without_its_content(tmp_path: Path) -> None:
    write(tmp_path / "set", [[list(range(5000))]])
    pickled = pickle.dumps(ids.IndexedDataset(tmp_path / "set"))
    assert len(pickled) < 500
    assert list(pickle.loads(pickled)[0]) == list(range(5000))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda b: b"NOTINDEX\x00" + b[9:], "starts with"),
        (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version 2"),
        (lambda b: b[:17] + b"\x09" + b[18:], "dtype code 9"),
        (lambda b: b[:-1], "speaks of"),
        (lambda b: b[:20], "shorter than"),
        (lambda b: b"", "shorter than"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, damage: object, reason: str) -> None:
    write(tmp_path / "set", [[[1, 2, 3]]])
    index = tmp_path / "set.idx"
    assert callable(damage)
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(ids.DatasetFormatError, match=reason) as error:
        ids.IndexedDataset(tmp_path / "set")
    assert str(index) in str(error.value)


def test_a_truncated_token_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set", [[[1, 2, 3]]])
    (tmp_path / "set.bin").write_bytes(b"\0" * 4)
    with pytest.raises(ids.DatasetFormatError, match="4 bytes, but the index speaks of 6"):
        ids.IndexedDataset(tmp_path / "set")


def test_a_dtype_without_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float16"):
        ids.IndexedDatasetBuilder(tmp_path / "set", np.float16)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_reads_ours_and_we_read_megatrons(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets import indexed_dataset as megatron

    documents = [[[1, 2, 3], [4]], [[5, 6]]]
    write(tmp_path / "ours", documents)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [list(theirs[i]) for i in range(len(theirs))] == [[1, 2, 3], [4], [5, 6]]
    assert list(theirs.document_indices) == [0, 2, 3]

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours = (tmp_path / f"ours.{suffix}").read_bytes()
        assert (tmp_path / f"theirs.{suffix}").read_bytes() == ours


def _prepare(data_dir: str, start: object, results: multiprocessing.Queue[str]) -> None:
    start.wait()  # type: ignore[attr-defined]
    results.put(corpus.prepare(None, Path(data_dir), 200_000))


def test_ranks_that_start_at_once_make_one_corpus(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # other tests may have left threads in this process
    start, results = context.Event(), context.Queue()
    ranks = [context.Process(target=_prepare, args=(str(tmp_path), start, results)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    start.set()
    prefixes = {results.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert len(prefixes) == 1
    dataset = ids.IndexedDataset(prefixes.pop())
    assert len(dataset.tokens) == 200_000 + len(dataset)
    assert all(document[-1] == corpus.END_OF_DOCUMENT for document in (dataset[0], dataset[-1]))
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    first = Path(corpus.prepare(None, tmp_path / "a", 50_000))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / f".{first.name}.tmp.bin").write_bytes(b"half a corpus")
    (tmp_path / "b" / f"{first.name}.bin").write_bytes(b"the index is still missing")
    again = Path(corpus.prepare(None, tmp_path / "b", 50_000))
    assert ids.bin_path(again).read_bytes() == ids.bin_path(first).read_bytes()


def test_a_file_of_ones_own_and_an_existing_prefix(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)))
    prefix = corpus.prepare(text, tmp_path / "cache", 10**6)
    assert list(ids.IndexedDataset(prefix)[0]) == [*range(256), corpus.END_OF_DOCUMENT]
    assert corpus.prepare(Path(prefix), tmp_path / "unused", 10**6) == prefix
    assert corpus.prepare(Path(prefix + ".bin"), tmp_path / "unused", 10**6) == prefix
    assert not (tmp_path / "unused").exists()


def test_no_text_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(corpus.CorpusError, match="neither a file nor"):
        corpus.prepare(tmp_path / "nothing", tmp_path, 10**6)
    (tmp_path / "empty").touch()
    with pytest.raises(corpus.CorpusError, match="empty"):
        corpus.prepare(tmp_path / "empty", tmp_path / "cache", 10**6)
