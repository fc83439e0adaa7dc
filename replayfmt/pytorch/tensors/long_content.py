"""The hash of long content, made of hashes of its chunks, which processors and devices compute side by side.

Content of more than LONG_BYTES is hashed as the XXH3-128 of the XXH3-64 of its chunks of CHUNK_BYTES, each as 8 bytes,
little-endian (FORMAT.md); shorter content as its XXH3-128. Up to a chunk's length, XXH3 adds up products of words and
constants in any order: that is what a device computes here, by operators that every device has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash

CHUNK_BYTES = 1 << 10
LONG_BYTES = 8 << 20  # a device and the host take equally long for 5 MiB of a device's
PIECE_BYTES = 32 << 20  # of a device's tensor, looked at at once, which takes at most twelve times as much there
_WORDS, _STRIPES, _LANES = CHUNK_BYTES // 8, 16, 8
_LOW = 0xFFFFFFFF
_SECRET = bytes.fromhex(  # XXH3's own
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    *(0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _hash_constants() -> bytes:
    places = [*range(0, 8 * (_STRIPES - 1), 8), len(_SECRET) - 64 - 7]
    secret = b"".join(_SECRET[at : at + 64] for at in places)
    others = [*_START, CHUNK_BYTES * _START[1] % (1 << 64)]
    return secret + _SECRET[11 : 11 + 64] + b"".join(each.to_bytes(8, "little") for each in others)


# What XXH3-64 combines the words of a chunk with, by stripe and lane, and its sums with; what the sums, and the whole,
# begin with.
HASH_CONSTANTS = _hash_constants()

# The hashes of whole chunks, little-endian; where there is a library in C++, digests.py has it compute them.
ChunkHashes = Callable[[memoryview], bytes]


def hash_chunks_with_xxhash(chunks: memoryview) -> bytes:
    """The XXH3-64 of each chunk, little-endian."""
    each = (chunks[start : start + CHUNK_BYTES] for start in range(0, len(chunks), CHUNK_BYTES))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, each), "<u8", len(chunks) // CHUNK_BYTES).tobytes()


class LongHash:
    """The hash of content that comes in order, in parts of any length, or as hashes of its whole chunks."""

    hash_chunks: ChunkHashes = staticmethod(hash_chunks_with_xxhash)

    def __init__(self) -> None:
        self._outer = xxhash.xxh3_128()
        self._rest = b""  # of a chunk that is not complete

    def update(self, part: Any) -> None:
        view = memoryview(part).cast("B")
        if self._rest:
            missing = CHUNK_BYTES - len(self._rest)
            self._rest, view = self._rest + bytes(view[:missing]), view[missing:]
            if len(self._rest) < CHUNK_BYTES:
                return
            self._outer.update(hash_chunks_with_xxhash(memoryview(self._rest)))
        whole = len(view) // CHUNK_BYTES * CHUNK_BYTES
        self._outer.update(self.hash_chunks(view[:whole]))
        self._rest = bytes(view[whole:])

    def add_hashes(self, of_chunks: Any) -> None:
        """The next chunks by their hashes. All before were whole."""
        self._outer.update(of_chunks)

    def intdigest(self) -> int:
        if self._rest:
            self._outer.update(xxhash.xxh3_64_intdigest(self._rest).to_bytes(8, "little"))
            self._rest = b""
        return int(self._outer.intdigest())


def is_long(length_bytes: int) -> bool:
    return length_bytes > LONG_BYTES


def content_hash(length_bytes: int) -> LongHash | xxhash.xxh3_128:
    """What hashes content of this length."""
    return LongHash() if is_long(length_bytes) else xxhash.xxh3_128()


# ------------------------------------------------------------------------------------------------------- on a device


def device_pieces(bits: torch.Tensor) -> Iterator[torch.Tensor] | None:
    """The elements of a device's tensor in row-major order, in flat pieces on the device: of whole chunks, but for the
    last one. None where they are scattered in a way that has no such pieces, or where the device cannot hash."""
    if not _hashes(bits.device) or bits.element_size() > 8:
        return None
    rows = bits.view(-1) if bits.is_contiguous() else bits
    row_bytes = rows.numel() // len(rows) * rows.element_size()
    step = CHUNK_BYTES // math.gcd(row_bytes, CHUNK_BYTES)
    many = PIECE_BYTES // row_bytes // step * step
    if not many:
        return None
    return (_aligned(rows[start : start + many].contiguous().view(-1)) for start in range(0, len(rows), many))


def _aligned(piece: torch.Tensor) -> torch.Tensor:
    """The same elements where words of 8 bytes can be read."""
    return piece.clone() if piece.storage_offset() * piece.element_size() % 8 else piece


def add_device_piece(running: LongHash, piece: torch.Tensor) -> None:
    """Hash a piece of `device_pieces` where it is. Waits for it, on the current stream."""
    whole = piece.numel() * piece.element_size() // CHUNK_BYTES
    length = whole * CHUNK_BYTES // piece.element_size()
    if whole:
        hashes = chunk_hashes(piece[:length].view(torch.int64)).cpu()
        running.add_hashes(hashes.numpy().astype("<i8", copy=False).data)
    if length < piece.numel():
        running.update(piece[length:].cpu().view(torch.uint8).numpy().data)


def chunk_hashes(words: torch.Tensor) -> torch.Tensor:
    """The XXH3-64 of each chunk of a flat int64 tensor, as int64, on its device."""
    secret, merging, start = _constants(words.device)
    words = words.view(-1, _STRIPES, _LANES)
    keyed = words ^ secret
    high = (keyed >> 32).bitwise_and_(_LOW)
    sums = keyed.bitwise_and_(_LOW).mul_(high).sum(1)
    sums += words.sum(1).view(-1, _LANES // 2, 2).flip(2).view(-1, _LANES)
    sums += start
    sums ^= merging
    # Products of 128 bits, folded: from those of halves.
    one, other = sums[:, 0::2], sums[:, 1::2]
    low, up, other_low, other_up = one & _LOW, (one >> 32) & _LOW, other & _LOW, (other >> 32) & _LOW
    middle = up * other_low
    cross = ((low * other_low >> 32) & _LOW) + (middle & _LOW) + low * other_up
    upper = ((middle >> 32) & _LOW) + ((cross >> 32) & _LOW) + up * other_up
    found = ((one * other) ^ upper).sum(1) + _signed(CHUNK_BYTES * _START[1])
    found ^= (found >> 37) & ((1 << 27) - 1)
    found *= 0x165667919E3779F9
    return found ^ (found >> 32) & _LOW


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What words are combined with, by stripe and lane; what sums are combined with; what sums begin with."""
    words = torch.frombuffer(bytearray(HASH_CONSTANTS), dtype=torch.int64).to(device)
    secret, merging, start, _length = words.split([_WORDS, _LANES, _LANES, 1])
    return secret.view(_STRIPES, _LANES), merging, start


@cache
def _hashes(device: torch.device) -> bool:
    """Whether a device computes these hashes. Found by trying it."""
    given = np.arange(4 * _WORDS, dtype="<i8") * 0x1E3779B185EBCA87
    try:
        found = chunk_hashes(torch.from_numpy(given).to(device)).cpu().numpy().astype("<i8")
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(found.tobytes() == hash_chunks_with_xxhash(given.data.cast("B")))
