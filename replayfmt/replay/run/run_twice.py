"""Runs operators twice, on memory with different prior content, to find the results that no replay reproduces.

The runs get copies of the same arguments and the same state of the random generators. If a byte of a result shows what
the memory held before, the kernel left it unwritten; if a word is an address in both runs, it is an address of this
process. Either makes the result opaque: it is neither compared nor embedded. Any other difference is nondeterminism: no
replay reproduces that operator bit for bit, so what depends on it is compared within tolerances. A third run, on memory
full of zeros, finds kernels that read what nothing wrote, and only ask whether it is zero. Used when a replay
differs from its capture, and before content is taken from a replay.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replayfmt.errors import SubstitutionFailed
from replayfmt.format.validation import printable
from replayfmt.pytorch.tensors.memory import byte_tensor, new_storage, row_major_bytes

from ..planning.kernels import CallSite
from ..verification import StopReplay
from .content import Clones, has_memory, strided_parts

_MOST_REPORTED = 10  # operators
_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
# The fill bytes of new memory in the first and the second run: bytes that kernels are unlikely to write.
_FILLS = (0xA5, 0x5C)
_LIBC = ctypes.CDLL(None)
_M_PERTURB = -6  # glibc's M_PERTURB: allocated memory is filled with the inverse of this byte
_WORD = 8


@dataclass(frozen=True)
class OpaqueFound:
    """Result `index` of the op at `ordinal` holds bytes that no replay reproduces, and why."""

    ordinal: int
    kernel_id: int
    index: int
    why: str


@dataclass(frozen=True)
class NondeterministicOp:
    """The op at `ordinal` differs from itself: `how`, and what would make it deterministic (`remedy`)."""

    ordinal: int
    kernel_id: int
    how: str
    remedy: str


def name_nondeterministic(
    found: Iterable[NondeterministicOp], describe: Callable[[int], tuple[str, str]]
) -> tuple[str, ...]:
    """Sentences that name nondeterministic ops, one for each operator; `describe` says what an ordinal is."""
    groups: dict[int, list[NondeterministicOp]] = {}
    for each in sorted(found, key=lambda each: each.ordinal):
        groups.setdefault(each.kernel_id, []).append(each)
    sentences = []
    for first, *more in list(groups.values())[:_MOST_REPORTED]:
        others = f"; {len(more)} more of its calls, up to ordinal {more[-1].ordinal}, differ, too" if more else ""
        name = describe(first.ordinal)[0]
        sentences.append(f"ordinal {first.ordinal} ({name}): {first.how}{others}; {first.remedy}")
    if len(groups) > _MOST_REPORTED:
        sentences.append(f"and {len(groups) - _MOST_REPORTED} more operators")
    return tuple(sentences)


class RunTwice:
    """Wraps kernels: each runs twice on copies before its actual call, or more often with `repeats`.

    `ordinals` are the ops to check, None for all; but not those that are `known`. With `patience_s` the replay is
    stopped after that many seconds; with `unless_found_by` at that ordinal, if nothing was found before it. `opaque`
    lists the opaque results; `unsteady` has each op that differs otherwise, by ordinal; `reached` is the ordinal that
    the search came to.
    """

    reason = ""

    def __init__(
        self,
        generators: Sequence[torch.Generator | None],
        ordinals: Collection[int] | None = None,
        patience_s: float | None = None,
        *,
        known: Collection[int] = (),
        unless_found_by: int | None = None,
        repeats: int = 1,
    ) -> None:
        self.opaque: list[OpaqueFound] = []
        self.unsteady: dict[int, NondeterministicOp] = {}
        self.given_up = ""  # why the search ended early
        self.left_out = ""  # which op could not be run twice, and why
        self.reached = 0
        self._known = known
        self._remedies: dict[int, str] = {}  # by kernel id
        self._unless_found_by, self._repeats = unless_found_by, repeats
        self._generators = [generator for generator in dict.fromkeys(generators) if generator is not None]
        self._ordinals = ordinals
        self._patience_s = patience_s
        self._began = time.monotonic()

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        if (
            not site.fills
            or site.once
            or only_views(site)
            or site.ordinal in self._known
            or (self._ordinals is not None and site.ordinal not in self._ordinals)
        ):
            return None
        return None, _Twice(self, site)

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        return None

    def look(self, site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the op of a site twice on copies, and record the differences."""
        self.reached = site.ordinal
        if self._unless_found_by is not None and site.ordinal >= self._unless_found_by and not self.found:
            raise StopReplay
        if self._patience_s is not None and time.monotonic() - self._began > self._patience_s:
            self.given_up = (
                f"the search for nondeterministic ops was given up at ordinal {site.ordinal}, after "
                f"{self._patience_s:.0f} s"
            )
            raise StopReplay
        try:
            first = self._run(site, args, kwargs, _FILLS[0], {})
            lengths = first.lengths()
            if any(device.type != "cpu" for device in lengths):  # its memory can be filled once its length is known
                first = self._run(site, args, kwargs, _FILLS[0], lengths)
            for _ in range(self._repeats):
                second = self._run(site, args, kwargs, _FILLS[1], lengths)
                how = self._compare(site, first, second)
                if not how:
                    how = self._compare(site, first.agreeing(second), self._run(site, args, kwargs, 0, lengths))
                    how = how and f"its kernel reads memory that nothing wrote: {how}"
                if how:
                    remedy = self._remedies.get(site.kernel_id)
                    if remedy is None:
                        remedy = self._remedies[site.kernel_id] = self._remedy(site, args, kwargs, lengths)
                    self.unsteady[site.ordinal] = NondeterministicOp(site.ordinal, site.kernel_id, how, remedy)
                    break
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
            # The actual call may raise it too, and reports where; memory for copies may be all that is missing.
            reason = printable((str(error).splitlines() or [type(error).__name__])[0], 200)
            self.left_out = self.left_out or f"the op at ordinal {site.ordinal} could not be run twice: {reason}"

    @property
    def found(self) -> bool:
        return bool(self.opaque or self.unsteady)

    def _run(
        self,
        site: CallSite,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fill: int,
        lengths: dict[torch.device, list[int]],
    ) -> Outcome:
        clones = Clones()
        copies, named = clones.of(args), clones.of(kwargs)
        with self._undrawn(), _new_memory_filled(fill, lengths):
            return Outcome.of(site, site.original(*copies, **named), copies, named)

    def _compare(self, site: CallSite, first: Outcome, second: Outcome) -> str:
        """How two runs differ; "" if only in what makes results opaque, which is kept."""
        how = ""
        for (label, place), one in first.values.items():
            other = second.values.get((label, place))
            if other is None:
                continue
            if one.dtype != other.dtype or one.shape != other.shape:
                how = how or "its results have other shapes"
                continue
            if same_elements(one, other):
                continue
            why = _explained(_elements(one), _elements(other))
            if why is None:
                how = how or _difference(one, other)
            elif isinstance(label, int):  # an argument that was resized is among the results, too
                self.opaque.append(OpaqueFound(site.ordinal, site.kernel_id, label, why))
        return how

    def _remedy(
        self, site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any], lengths: dict[torch.device, list[int]]
    ) -> str:
        """What would make a nondeterministic op deterministic, found by trying it."""
        name = site.kernel.schema.name
        instead = ""
        if any(part in name for part in _ATTENTION):
            instead = " (or run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
        try:
            with _deterministic():
                first = self._run(site, args, kwargs, _FILLS[0], lengths)
                same = not any(
                    self._compare(site, first, self._run(site, args, kwargs, _FILLS[0], lengths)) for _ in range(4)
                )
        except RuntimeError as error:
            if "CUBLAS_WORKSPACE_CONFIG" in str(error):
                return "set CUBLAS_WORKSPACE_CONFIG=:4096:8 and torch.use_deterministic_algorithms(True)"
            return f"PyTorch has no deterministic kernel for it{instead}"
        if same:
            return f"torch.use_deterministic_algorithms(True) makes it deterministic{instead}"
        return f"torch.use_deterministic_algorithms(True) does not make it deterministic{instead}"

    @contextmanager
    def _undrawn(self) -> Iterator[None]:
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


class _Twice:
    """Called in place of a site's kernel."""

    def __init__(self, search: RunTwice, site: CallSite) -> None:
        self._search, self._site = search, site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._search.look(self._site, args, kwargs)
        return self._site.original(*args, **kwargs)


@dataclass(frozen=True)
class Outcome:
    """What a call produced: results by index, and arguments that it may have written by name. Parts of composites and
    lists under the same label are numbered in the label's text."""

    values: dict[tuple[int | str, str], torch.Tensor]

    @staticmethod
    def of(site: CallSite, returned: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        schema = site.kernel.schema
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        slots = set(site.effects.writes) | set(site.effects.unsure)
        written = {
            each.node.name: given[each.node.name]
            for each in site.layout.args
            if set(each.tensors) & slots and each.node.name in given
        }
        results = (returned,) if len(schema.returns) == 1 else returned if schema.returns else ()
        labelled: list[tuple[int | str, Any]] = [*enumerate(results if isinstance(results, list | tuple) else ())]
        labelled += written.items()
        return Outcome(
            {
                (label, place): value
                for label, whole in labelled
                for place, value in strided_parts(whole, "")
                if isinstance(value, torch.Tensor) and has_memory(value)
            }
        )

    def agreeing(self, other: Outcome) -> Outcome:
        """What is the same in another outcome, of the same shapes."""
        both = self.values.keys() & other.values.keys()
        return Outcome({key: self.values[key] for key in both if same_elements(self.values[key], other.values[key])})

    def lengths(self) -> dict[torch.device, list[int]]:
        """The lengths of the returned storages, by device."""
        found: dict[torch.device, list[int]] = {}
        for (label, _place), value in self.values.items():
            if isinstance(label, int):
                found.setdefault(value.device, []).append(value.untyped_storage().nbytes())
        return found


def only_views(site: CallSite) -> bool:
    """Whether an op computes nothing: all that it returns are views of its arguments."""
    returns = site.kernel.schema.returns
    views = all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return bool(returns) and views and not site.effects.writes and not site.effects.unsure


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def _new_memory_filled(fill: int, lengths: dict[torch.device, list[int]]) -> Iterator[None]:
    """Fill memory allocated inside with this byte: everything from malloc, and storages of these lengths from caching
    allocators."""
    _LIBC.mallopt(_M_PERTURB, fill ^ 0xFF)
    try:
        for device, all_of in lengths.items():
            _dirty([new_storage(length, device) for length in all_of], fill)
        yield
    finally:
        _LIBC.mallopt(_M_PERTURB, 0)


def _dirty(storages: list[torch.UntypedStorage], fill: int) -> None:
    """Fill storages before they are released."""
    for storage in storages:
        byte_tensor(storage).fill_(fill)


def _elements(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a strided tensor's elements in row-major order."""
    return np.frombuffer(row_major_bytes(tensor), np.uint8)


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit, compared where they are if that is cheap."""
    if one.is_contiguous() and other.is_contiguous() and not (one.is_conj() or one.is_neg() or one.is_quantized):
        length = one.numel() * one.element_size()
        parts = [
            byte_tensor(each.untyped_storage())[int(each.storage_offset()) * each.element_size() :][:length]
            for each in (one, other)
        ]
        return torch.equal(*parts)
    return bool((_elements(one) == _elements(other)).all())


def _explained(one: np.ndarray, other: np.ndarray) -> str | None:
    """Why two runs may differ in these bytes; None if it is nondeterminism."""
    unequal = one != other
    unwritten = (one == _FILLS[0]) & (other == _FILLS[1])
    rest = unequal & ~unwritten
    if not rest.any():
        return f"{int(unwritten.sum())} of its {len(one)} bytes are left unwritten"
    if len(one) % _WORD:
        return None
    words = np.flatnonzero(rest.reshape(-1, _WORD).any(axis=1))
    starts, ends = _mapped()
    for run in (one, other):
        values = run.view(np.uint64)[words]
        place = np.searchsorted(starts, values, "right")
        if not place.all() or (values >= ends[place - 1]).any():
            return None
    return f"{len(words)} of its {len(one) // _WORD} words are addresses"


def _mapped() -> tuple[np.ndarray, np.ndarray]:
    """The start and end addresses of this process's memory mappings, ascending."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        ranges = [line.partition(" ")[0].split("-") for line in maps]
    bounds = np.array([[int(bound, 16) for bound in each] for each in ranges], np.uint64).reshape(-1, 2)
    return bounds[:, 0], bounds[:, 1]


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """How far apart two results of one op are; "" if they are numerically equal."""
    count = int(((one != other) & ~(one.isnan() & other.isnan())).sum())
    if not count:
        return ""
    largest = float((one.to(torch.float64) - other.to(torch.float64)).abs().nan_to_num().max())
    return f"{count} of {one.numel()} elements differ, by at most {largest:.3g}"
