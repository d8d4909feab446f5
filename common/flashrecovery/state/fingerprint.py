"""Fingerprints of tensors that lie on a device, computed there: only a few bytes a tensor come to the host.

A tensor's bytes, in index order, are cut into 64-bit words, the last one filled up with zeros. Each word is changed
by a bijection that depends on its position (a key of the position added, a multiplication by an odd number of the
page, and MurmurHash3's finalizer), and two sums of the results are kept, both modulo 2^64: of the values and of their
squares. The fingerprint is these and the number of bytes. Everything is exact arithmetic on integers, and the order
of a sum does not matter, so every device and the host come to the same.

How strong it is. A change within one word, of a bit above all, is always seen: the bijection gives another value, and
no other word makes up for it. Of changes of several words (two that are swapped, a shift, the same amount added here
and subtracted there, zeros or NaN in place of a message) the values are as good as random numbers, so the first sum
misses them with a probability of about 2^-64, and the second one misses 2^-57 of these: two values of equal sum and
equal sum of squares are the same two, but for factors of two. This was not proved. It was looked for: of 2^22 random
words, each with the same bit flipped, no two values changed by the same amount, for any of the 64 bits. It is not
cryptographic: nothing in it is secret, and an attacker can construct two contents with the same fingerprint. It detects
damage, not tampering.

Cost: each word is read and written some thirty times, in pages that stay in a GPU's cache, with 16 small kernels a
page. Besides the tensor, 4 pages of memory are used (64 MiB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flashrecovery.state.exact import exact_contiguous

PAGE_WORDS = 1 << 21
"""Words with separate keys; the next page has the same keys, and another factor."""
SMALL_BYTES = 4096
"""Tensors below are not worth the kernels: their bytes come to the host."""

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_MURMUR = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_SHIFT = 33
_MARK = b"words"


class Fingerprints:
    """The fingerprints of several tensors, with one wait for the device.

    ``settle`` is called when all is queued on the calling thread's current stream, and returns when it has happened; by
    default the host waits for that stream.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._pages: dict[torch.device, _Page] = {}
        self._small: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        self._sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        self._nbytes: list[int] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Queue what is to be done for ``tensor``, which is not changed until it has happened; returns its number."""
        number, nbytes = len(self._nbytes), tensor.numel() * tensor.element_size()
        self._nbytes.append(nbytes)
        if nbytes == 0:
            return number
        device = tensor.device
        # A non-contiguous tensor costs one contiguous copy on its own device.
        flat = exact_contiguous(tensor).reshape(-1).view(torch.uint8)
        if nbytes < SMALL_BYTES:
            self._small.setdefault(device, []).append((number, flat))
            return number
        page = self._pages.get(device)
        if page is None or page.words < min(PAGE_WORDS, -(-nbytes // 8)):
            page = self._pages[device] = _Page(device, min(PAGE_WORDS, -(-nbytes // 8)))
        self._sums.setdefault(device, []).append((number, page.sums(flat)))
        return number

    def results(self) -> list[bytes]:
        """By number, what :func:`~.digest.shard_digest` takes in place of a tensor's bytes. To be
        called once."""
        found = [b""] * len(self._nbytes)
        arriving = [
            (where, numbers, _to_host(torch.cat([flat for _, flat in parts])))
            for where, queued in ((_raw, self._small), (_summed, self._sums))
            for parts in queued.values()
            for numbers in [[number for number, _ in parts]]
        ]
        if self._settle is not None:
            self._settle()
        else:
            for device in self._small.keys() | self._sums.keys():
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        for cut, numbers, content in arriving:
            for number, part in zip(numbers, cut(content, [self._nbytes[n] for n in numbers]), strict=True):
                found[number] = part
        self._pages.clear()
        return found


def _raw(content: torch.Tensor, sizes: list[int]) -> Iterator[bytes]:
    for part in content.split(sizes):
        yield part.numpy().tobytes()


def _summed(content: torch.Tensor, sizes: list[int]) -> Iterator[bytes]:
    for pair, nbytes in zip(content.view(-1, 2), sizes, strict=True):
        yield _MARK + nbytes.to_bytes(8, "little") + pair.numpy().astype("<i8").tobytes()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its content when the stream has come so far; page-locked, or the host would wait for it here."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)


class _Page:
    """Room to work in on one device, and the keys of the positions within a page."""

    def __init__(self, device: torch.device, words: int) -> None:
        self.words = words
        self._filled = torch.empty(words, dtype=torch.int64, device=device)
        self._mixed = torch.empty(words, dtype=torch.int64, device=device)
        self._high = torch.empty(words, dtype=torch.int64, device=device)
        self._keys = torch.arange(1, words + 1, dtype=torch.int64, device=device).mul_(_signed(GOLDEN))
        _finalize(self._keys, self._high)

    def sums(self, flat: torch.Tensor) -> torch.Tensor:
        """Both sums of a tensor's bytes."""
        size = 8 * PAGE_WORDS
        both = [self._of_page(number, flat[start : start + size]) for number, start in _pages(flat.numel(), size)]
        return both[0] if len(both) == 1 else torch.stack(both).sum(0)

    def _of_page(self, number: int, content: torch.Tensor) -> torch.Tensor:
        words = self._words(content)
        mixed, high = self._mixed[: words.numel()], self._high[: words.numel()]
        torch.add(words, self._keys[: words.numel()], out=mixed)
        mixed.mul_(_signed(page_factor(number)))
        _finalize(mixed, high)
        values = mixed.sum()
        return torch.stack([values, mixed.mul_(mixed).sum()])

    def _words(self, content: torch.Tensor) -> torch.Tensor:
        count, rest = divmod(content.numel(), 8)
        if rest == 0 and content.data_ptr() % 8 == 0 and content.storage_offset() % 8 == 0:
            return content.view(torch.int64)
        if rest:
            self._filled[count : count + 1].zero_()
        filled = self._filled[: count + (rest > 0)]
        filled.view(torch.uint8)[: content.numel()].copy_(content)
        return filled


def _pages(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    return enumerate(range(0, nbytes, size))


def _finalize(words: torch.Tensor, high: torch.Tensor) -> None:
    """MurmurHash3's, in place; ``high`` is room for as many."""
    for factor in (*_MURMUR, None):
        # Integers have a sign in torch, and are shifted with it: it is taken away again.
        torch.bitwise_right_shift(words, _SHIFT, out=high)
        words.bitwise_xor_(high.bitwise_and_((1 << (64 - _SHIFT)) - 1))
        if factor is not None:
            words.mul_(_signed(factor))


def finalized(word: int) -> int:
    """The finalizer of the hash, for one word; both are from 0 to 2^64 - 1."""
    for factor in (*_MURMUR, None):
        word ^= word >> _SHIFT
        if factor is not None:
            word = word * factor & _MASK
    return word


def key(number: int) -> int:
    """A pseudo-random word."""
    return finalized(number * GOLDEN & _MASK)


def page_factor(number: int) -> int:
    """Odd. Of other numbers than the positions' keys: else key(2) * key(3) would stand for two positions."""
    return key(~number & _MASK) | 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
