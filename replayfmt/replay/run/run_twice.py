"""Runs operators twice, on memory with different prior content, to find the results that no replay reproduces.

The runs get the same arguments (copies of those that the operator may write) and the same state of the random
generators. New memory holds one fill in the first run and zeros in the second, so a kernel that reads what nothing
wrote, if only to ask whether it is zero, differs. If two runs differ, three more with a fill each tell why: bytes that
follow the fills were left unwritten, and words that are addresses of this process in both runs are of no other. Either
makes the result opaque: it is neither compared nor embedded. Any other difference is nondeterminism: no replay
reproduces that operator bit for bit, so what depends on it is compared within tolerances. Results are compared where
they are. Used when a replay differs from its capture, and before content is taken from a replay.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replayfmt.format.validation import printable
from replayfmt.pytorch.accelerators import undrawn
from replayfmt.pytorch.tensors.memory import INTEGERS, byte_tensor, make_view, new_storage, parts

from ..planning.kernels import CallSite, KernelStandIn
from ..verification import StopReplay
from .content import Clones, has_memory, strided_parts

_MOST_REPORTED = 10  # operators
_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
# What new memory holds: a byte that kernels are unlikely to write in the first run, zeros in the second, and another
# such byte once they differ. New storages on the CPU hold torch's junk in place of the bytes.
_FILLS = (0xA5, 0, 0x5C)
_WORD_BYTES = 8
_SAMPLE = 64  # words that are looked at before all of them are
_PIECE = 1 << 22  # elements that are explained at once
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

Key = tuple[int | str, str]  # of a result, see Outcome
Lengths = dict[torch.device, list[int]]


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


class RunTwice(KernelStandIn):
    """Wraps kernels: each runs twice before its actual call, or more often with `repeats`.

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
        self._lengths: dict[Hashable, Lengths] = {}  # of results, where calls with the same metadata had any
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
        return None, functools.partial(self._twice, site)

    def _twice(self, site: CallSite, /, *args: Any, **kwargs: Any) -> Any:
        self._look(site, args, kwargs)
        return site.original(*args, **kwargs)

    def _look(self, site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            self._search(_Call(self, site, args, kwargs))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError) as error:
            # The actual call may raise it too, and reports where; memory for copies may be all that is missing.
            reason = printable((str(error).splitlines() or [type(error).__name__])[0], 200)
            self.left_out = self.left_out or f"the op at ordinal {site.ordinal} could not be run twice: {reason}"

    @property
    def found(self) -> bool:
        return bool(self.opaque or self.unsteady)

    def _search(self, call: _Call) -> None:
        site = call.site
        key = site.signature_id, site.metas
        known = self._lengths.get(key, {})
        first = call.run(_FILLS[0], known)
        lengths = self._lengths[key] = first.lengths()
        if lengths != known:  # a device's memory can be filled once the lengths are known
            first = call.run(_FILLS[0], lengths)
        if lengths and self._repeats > 1:
            first, second = call.runs(_FILLS[:2], lengths)
        else:
            second = call.run(_FILLS[1], lengths)
        for turn in range(1, self._repeats + 1):
            differing = first.differing(second)
            if differing and self._explain(call, first, second, differing, lengths):
                return
            if turn < self._repeats:
                second = call.run(_FILLS[(turn + 1) % 2], lengths)

    def _explain(
        self, call: _Call, first: Outcome, second: Outcome, differing: Collection[Key], lengths: Lengths
    ) -> bool:
        """Keep why two runs differ; whether that is more than what makes results opaque."""
        site = call.site
        filled = call.runs(_FILLS, lengths)
        unsteady = []
        how = ""
        for key in differing:
            one, other = first.values[key], second.values[key]
            if one.dtype != other.dtype or one.shape != other.shape:
                how = how or "its results have other shapes"
                unsteady.append(key)
                continue
            found = [
                (run.values[key], fill)
                for run, fill in zip(filled, _FILLS, strict=True)
                if key in run.values and run.values[key].shape == one.shape
            ]
            why = _explained(one, other, found if len(found) == len(_FILLS) else [])
            if why is None:
                difference = _difference(one, other)
                if difference:
                    how = how or difference
                    unsteady.append(key)
            elif isinstance(key[0], int):  # an argument that was resized is among the results, too
                self.opaque.append(OpaqueFound(site.ordinal, site.kernel_id, key[0], why))
        if not unsteady:
            return False
        if not filled[0].differing(first, unsteady) and not filled[1].differing(second, unsteady):
            how = f"its kernel reads memory that nothing wrote: {how}"
        remedy = self._remedies.get(site.kernel_id)
        if remedy is None:
            remedy = self._remedies[site.kernel_id] = _remedy(call, unsteady, lengths)
        self.unsteady[site.ordinal] = NondeterministicOp(site.ordinal, site.kernel_id, how, remedy)
        return True

    def drawn_from(self, site: CallSite) -> list[torch.Generator]:
        """The random generators that an op may draw from."""
        return self._generators if site.kernel.draws or not site.kernel.own else []


@dataclass(frozen=True)
class _Call:
    """One call of a site's kernel, to be repeated."""

    search: RunTwice
    site: CallSite
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, fill: int, lengths: Lengths, pool: Any = None) -> Outcome:
        """Its outcome if new memory holds this fill, with results of these lengths; on a device whatever is new, if it
        comes from a pool."""
        clones = Clones(only=written_storages(self.site, self.args, self.kwargs))
        copies, named = clones.of(self.args), clones.of(self.kwargs)
        with undrawn(self.search.drawn_from(self.site)), _new_memory_filled(fill, lengths, pool):
            returned = self.site.original(*copies, **named)
            outcome = Outcome.of(self.site, returned, copies, named)  # here: dense copies of other layouts are new, too
        if pool is None:
            return outcome
        kept = Clones()  # the pool's memory is for the next run
        return Outcome({key: kept.of(value) for key, value in outcome.values.items()})

    def runs(self, fills: Sequence[int], lengths: Lengths) -> list[Outcome]:
        """Its outcomes with each fill. Where a device has private pools, no other memory is new: a caching allocator
        may give out any free memory for results, and for what a kernel needs in between."""
        device = next((device for device in lengths if device.type == "cuda"), None)
        if device is not None:
            try:
                with torch.cuda.device(device):
                    pool = torch.cuda.MemPool()
                    self.run(fills[0], {device: []}, pool)  # the pool gets as much memory as the call needs
                    return [self.run(fill, {device: []}, pool) for fill in fills]
            except RuntimeError:  # no memory is left for a pool, or the allocator has none
                pass
        return [self.run(fill, lengths) for fill in fills]


def _remedy(call: _Call, keys: Collection[Key], lengths: Lengths) -> str:
    """What would make a nondeterministic op deterministic, found by trying it."""
    name = call.site.kernel.schema.name
    instead = ""
    if any(part in name for part in _ATTENTION):
        instead = " (or run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
    try:
        with _deterministic():
            first = call.run(_FILLS[0], lengths)
            same = not any(first.differing(call.run(_FILLS[0], lengths), keys) for _ in range(4))
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" in str(error):
            return "set CUBLAS_WORKSPACE_CONFIG=:4096:8 and torch.use_deterministic_algorithms(True)"
        return f"PyTorch has no deterministic kernel for it{instead}"
    if same:
        return f"torch.use_deterministic_algorithms(True) makes it deterministic{instead}"
    return f"torch.use_deterministic_algorithms(True) does not make it deterministic{instead}"


@dataclass(frozen=True)
class Outcome:
    """What a call produced: results by index, and arguments that it may have written by name. Parts of composites and
    lists under the same label are numbered in the label's text."""

    values: dict[Key, torch.Tensor]

    @staticmethod
    def of(site: CallSite, returned: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Outcome:
        schema = site.kernel.schema
        results = (returned,) if len(schema.returns) == 1 else returned if schema.returns else ()
        labelled: list[tuple[int | str, Any]] = [*enumerate(results if isinstance(results, list | tuple) else ())]
        labelled += _written(site, args, kwargs).items()
        return Outcome(
            {
                (label, place): value
                for label, whole in labelled
                for place, value in strided_parts(whole, "")
                if isinstance(value, torch.Tensor) and has_memory(value)
            }
        )

    def differing(self, other: Outcome, keys: Collection[Key] | None = None) -> list[Key]:
        """What is in both, or which of these, and not the same."""
        both = [key for key in self.values if key in other.values and (keys is None or key in keys)]
        same = _same([(self.values[key], other.values[key]) for key in both])
        return [key for key, equal in zip(both, same, strict=True) if not equal]

    def lengths(self) -> Lengths:
        """The lengths of the storages that were returned on devices, by device."""
        found: Lengths = {}
        for (label, _place), value in self.values.items():
            if isinstance(label, int) and value.device.type != "cpu":
                found.setdefault(value.device, []).append(value.untyped_storage().nbytes())
        return found


def written_storages(site: CallSite, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """The storages of arguments that a call writes or may write, by identity."""
    return {key for value in _written(site, args, kwargs).values() for key in _storages(value)}


def _written(site: CallSite, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    slots = {*site.effects.writes, *site.effects.unsure}
    names = [each.node.name for each in site.layout.args if slots.intersection(each.tensors)]
    if not names:
        return {}
    given = {**dict(zip((each.name for each in site.kernel.schema.arguments), args, strict=False)), **kwargs}
    return {name: given[name] for name in names if name in given}


def _storages(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and has_memory(value)
        return [value.untyped_storage()._cdata] if strided else []
    if isinstance(value, torch.UntypedStorage):
        return [value._cdata]
    return [each for part in value for each in _storages(part)] if isinstance(value, list | tuple) else []


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
def _new_memory_filled(fill: int, lengths: Lengths, pool: Any = None) -> Iterator[None]:
    """Fill memory allocated inside: new storages on the CPU with torch's junk (zeros for 0), storages of these lengths
    from caching allocators with this byte, and all that a pool gives out."""
    flag = _fill_flags().get(not fill)
    with ExitStack() as stack:
        for device, all_of in lengths.items():
            _dirty([new_storage(length, device) for length in all_of], fill)
        if flag is not None:
            # Not by glibc's M_PERTURB: with it, other threads (a driver's) get memory from calloc that is not zero.
            stack.callback(setattr, flag, "value", flag.value)
            flag.value = True
        if pool is not None:
            torch.cuda.synchronize()  # an op may use streams of its own
            _fill_free(pool.snapshot(), next(iter(lengths)), fill)
            stack.enter_context(torch.cuda.use_mem_pool(pool))
        yield


@functools.cache
def _fill_flags() -> dict[bool, ctypes.c_bool]:
    """torch's flags to fill new storages on the CPU with zeros (True) and with junk (False), where it has them."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        names = {True: "zero", False: "junk"}
        return {
            zero: ctypes.c_bool.in_dll(library, f"FLAGS_caffe2_cpu_allocator_do_{name}_fill")
            for zero, name in names.items()
        }
    except (OSError, ValueError):
        return {}


def _dirty(storages: list[torch.UntypedStorage], fill: int) -> None:
    for storage in storages:
        byte_tensor(storage).fill_(fill)


def _fill_free(segments: list[dict[str, Any]], device: torch.device, fill: int) -> None:
    """Fill what is free in a pool's segments on a device, given as its snapshot has them."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                free: Any = torch._C._construct_storage_from_data_pointer(address, device, block["size"])
                byte_tensor(free).fill_(fill)
            address += block["size"]


def _bits(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """The elements of a strided tensor's memory as integers, or those at its places in another storage."""
    size, strides, offset = tensor.element_size(), tensor.stride(), int(tensor.storage_offset())
    storage = storage or tensor.untyped_storage()
    if size == 16:
        return make_view(storage, torch.int64, (*tensor.shape, 2), (*(2 * each for each in strides), 1), 2 * offset)
    return make_view(storage, _INTEGER[size], tensor.shape, strides, offset)


def _both_bits(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if one.is_conj() != other.is_conj() or one.is_neg() != other.is_neg():
        one, other = (each.resolve_conj().resolve_neg() for each in (one, other))
    return _bits(one), _bits(other)


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit, compared where they are."""
    return _same([(one, other)])[0]


def _same(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether each two tensors are equal bit for bit. Waits once for each device."""
    same = [True] * len(pairs)
    waiting: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for place, (one, other) in enumerate(pairs):
        if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
            same[place] = False
        elif one.device.type == "cpu":
            same[place] = torch.equal(*_both_bits(one, other))
        else:
            places, verdicts = waiting.setdefault(one.device, ([], []))
            places.append(place)
            verdicts.append(torch.ne(*_both_bits(one, other)).any())
    for places, verdicts in waiting.values():
        for place, differs in zip(places, torch.stack(verdicts).tolist(), strict=True):
            same[place] = not differs
    return same


def _explained(one: torch.Tensor, other: torch.Tensor, filled: Sequence[tuple[torch.Tensor, int]]) -> str | None:
    """Why two runs may differ in these results; None if it is nondeterminism. `filled` are results of more runs, each
    with the fill of what was new in it."""
    bits, other_bits = _both_bits(one, other)
    evidence = [(_bits(result), _unwritten(result, fill), fill) for result, fill in filled]
    counts, rests = [], []
    for a, b, *runs in zip(
        *(parts(each, _PIECE) for each in (bits, other_bits)),
        *(parts(each, _PIECE) for result, pattern, _ in evidence for each in (result, pattern)),
        strict=True,
    ):
        differs = _bytes(a) != _bytes(b)
        unwritten = torch.full_like(differs, bool(evidence))
        for result, pattern, (*_, fill) in zip(runs[::2], runs[1::2], evidence, strict=True):
            held = _bytes(result)
            unwritten &= (held == _bytes(pattern)) | (held == fill)
        rest = differs & ~unwritten
        counts.append(torch.stack([unwritten.sum(), rest.sum()]))
        rests.append(rest)
    unwritten_bytes, rest_bytes = torch.stack(counts).sum(0).tolist()
    length_bytes = one.numel() * one.element_size()
    if not rest_bytes:
        return f"{unwritten_bytes} of its {length_bytes} bytes are left unwritten"
    if length_bytes % _WORD_BYTES:
        return None
    words = torch.cat(rests).view(-1, _WORD_BYTES).any(dim=1).nonzero().view(-1)
    for some in (words[:_SAMPLE], words):
        for each in (bits, other_bits):
            if not _are_addresses(_bytes(each).view(-1, _WORD_BYTES)[some].view(torch.int64)):
                return None
    return f"{len(words)} of its {length_bytes // _WORD_BYTES} words are addresses"


def _bytes(bits: torch.Tensor) -> torch.Tensor:
    return bits.contiguous().view(-1).view(torch.uint8)


def _unwritten(like: torch.Tensor, fill: int) -> torch.Tensor:
    """The bits of such a tensor on new memory that holds a fill."""
    if like.device.type == "cpu" and _fill_flags():
        with _new_memory_filled(fill, {}):
            return _bits(like, new_storage(like.untyped_storage().nbytes(), like.device))
    bits = _bits(like)
    value = int.from_bytes(bytes([fill]) * bits.element_size(), "little", signed=bits.dtype != torch.uint8)
    return bits.new_full((), value).expand(bits.shape)


def _are_addresses(words: torch.Tensor) -> bool:
    """Whether all of these lie in this process's memory mappings."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        ranges = [line.partition(" ")[0].split("-") for line in maps]
    bounds = np.array([[int(bound, 16) for bound in each] for each in ranges], np.uint64).reshape(-1, 2)
    starts, ends = bounds[:, 0], bounds[:, 1]  # ascending
    values = words.cpu().numpy().reshape(-1).view(np.uint64)
    place = np.searchsorted(starts, values, "right")
    return bool(place.all()) and not (values >= ends[place - 1]).any()


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    """How far apart two results of one op are; "" if they are numerically equal."""
    found = []
    try:
        for a, b in zip(parts(one, _PIECE), parts(other, _PIECE), strict=True):
            x, y = _numbers(a), _numbers(b)
            if one.dtype in INTEGERS:
                differs = torch.ne(*_both_bits(a, b)).reshape(x.shape)
            else:
                differs = (x != y) & ~(x.isnan() & y.isnan())
            found.append(torch.stack([differs.any(dim=-1).sum().double(), (x - y).abs().nan_to_num().max()]))
        counts, largest = torch.stack(found).unbind(1)
        count = int(counts.sum())
        return f"{count} of {one.numel()} elements differ, by at most {float(largest.max()):.3g}" if count else ""
    except RuntimeError:  # the dtype has no numbers here
        bits = [each.reshape(one.numel(), -1) for each in _both_bits(one, other)]
        return f"{int(torch.ne(*bits).any(dim=1).sum())} of {one.numel()} elements differ"


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as float64, each in a row of its own."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return values.resolve_neg().to(torch.float64).reshape(tensor.numel(), -1)
