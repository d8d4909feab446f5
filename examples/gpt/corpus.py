"""Real text to train on, as a token data set on disk that is made once and then shared by all ranks and runs.

The tokens are bytes (0..255) and one end-of-document mark (256), so any file is valid input and there is no
tokenizer to fetch. Sources, in this order of preference:

* ``--data PREFIX``: an existing ``PREFIX.bin``/``PREFIX.idx`` pair, e.g. from Megatron's preprocessing;
* ``--data FILE``: any file, as one document;
* otherwise the sources of Python's own standard library, one document a file, in sorted order.

Several ranks start at once and any of them may be killed while it writes: the work is done under a file lock,
in temporary files, and the index, which is what readers look for, is renamed into place last.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np

import indexed_dataset

END_OF_DOCUMENT = 256
VOCABULARY = 257
TOKEN_DTYPE = np.uint16

Documents: TypeAlias = Callable[[], Iterator[bytes]]


class CorpusError(RuntimeError):
    """There is no text to train on; the message says where it was looked for."""


def default_data_dir() -> Path:
    """``$XDG_CACHE_HOME/flashrecovery/gpt``, or below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrecovery" / "gpt"


def prepare(data: Path | None, data_dir: Path, max_bytes: int) -> str:
    """Make the data set if it is not there yet and return its prefix.

    Args:
        data: a file, an existing prefix (with or without ``.bin``), or None for the standard library.
        data_dir: where data sets that are made here are kept.
        max_bytes: at most so much text is taken.

    Raises:
        CorpusError: no such file, or no text found.
    """
    if data is None:
        version = ".".join(map(str, sys.version_info[:3]))
        return _build_once(data_dir, f"stdlib-{version}-{max_bytes}", lambda: _standard_library(max_bytes))
    prefix = data.with_suffix("") if data.suffix in (".bin", ".idx") else data
    if indexed_dataset.exists(prefix):
        return str(prefix)
    if not data.is_file():
        raise CorpusError(f"--data {data}: neither a file nor a prefix of a .bin/.idx pair")
    stat = data.stat()
    identity = f"{data.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{max_bytes}"
    name = f"{data.name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return _build_once(data_dir, name, lambda: _one_file(data, max_bytes))


def _standard_library(max_bytes: int) -> Iterator[bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    left = max_bytes
    for path in sorted(root.rglob("*.py")):
        if left <= 0:
            return
        if "site-packages" in path.parts or not path.is_file():
            continue
        text = path.read_bytes()[:left]
        if text:
            left -= len(text)
            yield text
    if left == max_bytes:
        raise CorpusError(f"no Python sources below {root}; give a text of your own with --data FILE")


def _one_file(path: Path, max_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as f:
        text = f.read(max_bytes)
    if not text:
        raise CorpusError(f"--data {path}: the file is empty")
    yield text


def _build_once(data_dir: Path, name: str, documents: Documents) -> str:
    prefix = data_dir / name
    data_dir.mkdir(parents=True, exist_ok=True)
    if indexed_dataset.exists(prefix):
        return str(prefix)
    with _locked(data_dir / f"{name}.lock"):
        if not indexed_dataset.exists(prefix):
            # One fixed temporary name: what a killed writer leaves is overwritten by the next one.
            temporary = data_dir / f".{name}.tmp"
            with indexed_dataset.IndexedDatasetBuilder(temporary, TOKEN_DTYPE) as builder:
                for text in documents():
                    builder.add_document(_tokens(text))
                builder.finalize()
            os.replace(indexed_dataset.bin_path(temporary), indexed_dataset.bin_path(prefix))
            os.replace(indexed_dataset.idx_path(temporary), indexed_dataset.idx_path(prefix))
    return str(prefix)


def _tokens(text: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    tokens = np.empty(len(text) + 1, TOKEN_DTYPE)
    tokens[:-1] = np.frombuffer(text, np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it if the holder dies. The lock file stays."""
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
