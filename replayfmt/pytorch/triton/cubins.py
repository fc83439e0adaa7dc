"""What a cubin says of the kernels in it: the device it is for, and each kernel's parameters and threads.

A cubin is an ELF file. The section `.nv.info.NAME` holds a kernel's attributes, which `cuobjdump --dump-elf` names:
their codes are those of that tool. How much dynamic shared memory a kernel needs is in none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

_MAGIC, _MACHINE = b"\x7fELF\x02\x01", 190  # 64 bits, little endian; NVIDIA CUDA
_ABI_OF_CUDA_13 = 0x41
_INFO = ".nv.info."
_PARAMETER, _MOST_THREADS, _EXACT_THREADS = 0x17, 0x05, 0x10
_SIZED = 4  # the form of attributes that have a content of their own


@dataclass(frozen=True)
class CubinKernel:
    """One kernel. `parameter_bytes`: the size of each parameter. `exact_threads`: how many threads a block must have,
    `most_threads`: may have, None if the cubin does not say."""

    name: str
    parameter_bytes: tuple[int, ...]
    exact_threads: int | None
    most_threads: int | None


@dataclass(frozen=True)
class Cubin:
    """`arch`: the compute capability that it is for, as 80 for 8.0. `only_there`: it runs on no later one."""

    arch: int
    only_there: bool
    kernels: Mapping[str, CubinKernel]

    @classmethod
    def read(cls, content: bytes) -> Cubin:
        """Raises ValueError for what is no cubin."""
        try:
            return cls._read(content)
        except (struct.error, IndexError, UnicodeDecodeError):
            raise ValueError("it is not a cubin: what its headers say is not in it") from None

    @classmethod
    def _read(cls, content: bytes) -> Cubin:
        if content[:6] != _MAGIC or struct.unpack_from("<H", content, 18)[0] != _MACHINE:
            raise ValueError("it is not a cubin: not an ELF file for NVIDIA devices")
        (flags,) = struct.unpack_from("<I", content, 48)
        if content[7] >= _ABI_OF_CUDA_13:
            arch, only_there = flags >> 8 & 0xFF, bool(flags & 0x8)
        else:
            arch, only_there = flags & 0xFF, bool(flags & 0x800)
        found = {}
        for name, section in _sections(content):
            if name.startswith(_INFO):
                kernel = _kernel(name.removeprefix(_INFO), section)
                found[kernel.name] = kernel
        return cls(arch, only_there, found)

    def mismatch(self, arch: int) -> str:
        """Why it cannot run on devices of a compute capability, or ""."""
        fits = arch == self.arch if self.only_there else arch // 10 == self.arch // 10 and arch >= self.arch
        return "" if fits else f"it is for sm_{self.arch}, this device is sm_{arch}"


def _sections(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section that has one."""
    (first,) = struct.unpack_from("<Q", content, 40)
    size, count, of_names = struct.unpack_from("<HHH", content, 58)
    headers = [struct.unpack_from("<IIQQQQ", content, first + size * place) for place in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, start, length in headers:
        if start + length > len(content) and kind != 8:  # of a kind that is not in the file
            raise IndexError
        end = content.find(b"\0", names + name)
        yield content[names + name : end].decode(), content[start : start + length]


def _kernel(name: str, section: bytes) -> CubinKernel:
    parameters: dict[int, int] = {}
    threads: dict[int, int] = {}
    place = 0
    while place < len(section):
        form, code, length = struct.unpack_from("<BBH", section, place)
        place += 4
        if form != _SIZED:
            continue
        value = section[place : place + length]
        place += length
        if code == _PARAMETER:
            _, ordinal, _, packed = struct.unpack("<IHHI", value)
            parameters[ordinal] = packed >> 18
        elif code in (_MOST_THREADS, _EXACT_THREADS):
            threads[code] = prod(struct.unpack("<III", value))
    if sorted(parameters) != list(range(len(parameters))):
        raise IndexError
    sizes = tuple(parameters[ordinal] for ordinal in sorted(parameters))
    return CubinKernel(name, sizes, threads.get(_EXACT_THREADS), threads.get(_MOST_THREADS))
