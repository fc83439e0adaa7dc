"""Kernels that write by ways that are not plain, with the parameters that each may write."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

POINTERS = {"a": "*fp32", "b": "*fp32", "c": "*fp32", "n": "i32"}


class Writing(NamedTuple):
    """A kernel, what it writes, and what is found besides from its source and from its intermediate code."""

    kernel: Any
    written: set[str]
    in_source: set[str]
    in_ir: set[str]

    @property
    def types(self) -> dict[str, str]:
        return {name: POINTERS[name] for name in self.kernel.arg_names}


KERNELS: dict[str, Writing] = {}


def writes(*written: str, in_source: str = "", in_ir: str = "") -> Any:
    def note(kernel: Any) -> Any:
        KERNELS[kernel.__name__] = Writing(kernel, set(written), set(in_source), set(in_ir))
        return kernel

    return note


@writes("a", "b")
@triton.jit
def one_of_two(a, b, c, n):
    p = a
    if n > 0:
        p = b
    tl.store(p, tl.load(c))


@writes("b", in_source="a")
@triton.jit
def swapped(a, b, n):
    a, b = b, a
    tl.store(a, tl.load(b) + n)


@writes("b", in_ir="a")
@triton.jit
def in_a_loop(a, b, n):
    p = a
    q = b
    i = 0
    while i < n:
        tl.store(q, tl.load(p))
        p += 1
        q += 1
        i += 1


@triton.jit
def moved(target, source, by):
    tl.store(target + by, tl.load(source + by))


@triton.jit(noinline=True)
def moved_elsewhere(target, source):
    tl.store(target, tl.load(source))


@triton.jit
def either(p, q, n):
    r = p
    if n > 1:
        r = q
    return r


@writes("a")
@triton.jit
def by_another(a, b, n):
    moved(a, b, n)


@writes("a")
@triton.jit
def by_another_that_is_not_inlined(a, b):
    moved_elsewhere(a, b)


@writes("a", "b")
@triton.jit
def where_another_says(a, b, c, n):
    tl.store(either(a, b, n), tl.load(c))


@writes("a", "b")
@triton.jit
def before_it_returns(a, b, c, n):
    if n > 3:
        tl.store(a, 1.0)
        return
    p = c
    if n > 1:
        p = b
        if n > 2:
            return
    tl.store(b, tl.load(p))


@writes("b")
@triton.jit
def at_what_was_read(a, b, n):
    at = tl.load(a).to(tl.int32)
    tl.store(b + at, at + n)


@writes("a")
@triton.jit
def by_an_exchange(a, b):
    tl.atomic_xchg(a, tl.load(b))


@writes("c")
@triton.jit
def by_a_method(a, b, c):
    (c + 1).store(tl.load(a + 1) + tl.load(b))


@triton.jit
def makes_pointers(a, n):
    tl.store(tl.load(a).to(tl.int64).to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def makes_pointers_like_another(a, b):
    tl.store(tl.load(a).to(tl.int64).to(b.dtype), 1.0)
