"""Verifies a replay: compares results with the capture, bit for bit or within tolerances, and checks their structure.

Bitwise, a digest or scalar must be equal. Otherwise values are close if they are within the tolerance of their dtype,
relative to the root mean square of the captured values. The structure of an op's results is their number, dtypes,
sizes, strides and memory: a result must share its storage with an argument in the replay if and only if it did in the
capture.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from replayfmt.errors import ReplayMismatch
from replayfmt.format.codes import DType, RecordKind, ValueKind
from replayfmt.format.model import TRIMMED_ELSEWHERE, TensorDigest
from replayfmt.format.reader import CaptureReader
from replayfmt.format.signature_layout import NodePlace
from replayfmt.format.validation import parse_json
from replayfmt.pytorch.environment import describe_device, replayed_settings, session_fields
from replayfmt.pytorch.tensors.digests import digest_tensor, hash_tensor
from replayfmt.pytorch.tensors.memory import DTYPE_CODE

from .operations import Pausable, View
from .planning.devices import DeviceMap
from .results import Divergence, SampleDistance, Verification, VerifyMode

# How far close values may be apart, relative as described above. These tolerances are wider than for a single op,
# because a model's result carries the rounding of every op before it: float32 leaves room for TF32 against full
# precision.
TOLERANCE: dict[DType, float] = {
    DType.float64: 1e-7,
    DType.complex128: 1e-7,
    DType.float32: 1e-3,
    DType.complex64: 1e-3,
    DType.float16: 1e-2,
    DType.complex32: 1e-2,
    DType.bfloat16: 5e-2,
    DType.float8_e4m3fn: 0.15,
    DType.float8_e4m3fnuz: 0.15,
    DType.float8_e5m2: 0.3,
    DType.float8_e5m2fnuz: 0.3,
    DType.float8_e8m0fnu: 0.5,
}
_SCALAR_TOLERANCE = 1e-3
# Numbers from here on stand for infinities (masks are filled with a dtype's lowest number). They are left out of the
# root mean square: with them in it, anything would be close.
LARGEST = {code: torch.finfo(dtype).max / 2 for dtype, code in DTYPE_CODE.items() if code in TOLERANCE}


class StopReplay(Exception):
    """Internal: the first divergence was found, and nothing after it is worth running."""


@dataclass(frozen=True, slots=True)
class CompareLocation:
    """What is compared: result number `result` of the op at `ordinal`; `found_at` is the record that shows it."""

    ordinal: int
    result: int | None
    found_at: int


class Judge:
    """Compares results, counts the comparisons and keeps the differences. Belongs to one plan and is reset for every
    replay.

    `describe` returns the name of what a record does and the path of its scope.
    """

    def __init__(self, clock: Pausable, describe: Callable[[int], tuple[str, str]]) -> None:
        self._clock = clock
        self._describe = describe
        self.bitwise = True
        self.tolerant = False  # whether what depends on nondeterministic ops may be close
        self.compares_scalars = True  # not when content is synthesized
        self.stop_at_first = True
        self.found: list[Divergence] = []
        self.verification = Verification("none", "none")

    def reset(self, verification: Verification, *, bitwise: bool, stop_at_first: bool, tolerant: bool = False) -> None:
        self.verification, self.bitwise, self.stop_at_first = verification, bitwise, stop_at_first
        self.tolerant = tolerant
        self.found = []

    def diverged(self, where: CompareLocation, expected: str, got: str, distance: SampleDistance | None = None) -> None:
        """Record a divergence; raises StopReplay if the replay is to stop at the first one."""
        what, scope = self._describe(where.ordinal)
        self.found.append(Divergence(where.ordinal, what, where.result, scope, expected, got, distance, where.found_at))
        if self.stop_at_first:
            raise StopReplay

    def _exact(self, unsteady: bool) -> bool:
        return self.bitwise and not (unsteady and self.tolerant)

    def scalar(self, where: CompareLocation, expected: Any, got: Any, *, read: bool, unsteady: bool) -> None:
        """Compare a result that is not a tensor. `read`: the program received it, so it left the device; `unsteady`: it
        depends on a nondeterministic op."""
        if not self.compares_scalars:
            return
        self.verification.scalars += read
        if _same_scalar(expected, got):
            return
        if not self._exact(unsteady) and _close_scalar(expected, got):
            self.verification.inexact += 1
            self.verification.tolerances["scalars"] = _SCALAR_TOLERANCE
            far = _scalar_distance(expected, got)
            if far is not None and far.relative is not None:
                largest = self.verification.largest
                largest["scalars"] = max(far.relative, largest.get("scalars", 0.0))
            return
        self.diverged(where, repr(expected), repr(got), _scalar_distance(expected, got))

    def digest(
        self, where: CompareLocation, expected: TensorDigest, tensor: torch.Tensor, *, host_read: bool, unsteady: bool
    ) -> None:
        """Compare a tensor with its captured digest; `unsteady`: it depends on a nondeterministic op."""
        self._clock.pause()
        low, high = hash_tensor(tensor)
        exact = self._exact(unsteady)
        if not self.bitwise:
            self._state_tolerance(tensor)
        if host_read:
            self.verification.host_reads += 1
        else:
            self.verification.digests += 1
        if (expected.hash_low, expected.hash_high, expected.elements) != (low, high, tensor.numel()):
            got = digest_tensor(tensor)
            difference: tuple[str, str] | None = _summary(expected), _summary(got)
            if not exact:
                difference = digests_differ(expected, got, DTYPE_CODE[tensor.dtype])
            if difference is None:
                self.verification.inexact += 1
                self._state_tolerance(tensor)
                code = DTYPE_CODE[tensor.dtype]
                far, largest = relative_distance(expected, got, code), self.verification.largest
                if far is not None:
                    largest[code.name] = max(far, largest.get(code.name, 0.0))
            else:
                self.diverged(where, *difference, sample_distance(expected, got))
        self._clock.resume()

    def _state_tolerance(self, tensor: torch.Tensor) -> None:
        code = DTYPE_CODE[tensor.dtype]
        if code in TOLERANCE:
            self.verification.tolerances[code.name] = TOLERANCE[code]


class Notes(Protocol):
    """Gets what a replay computes of all that can be compared."""

    def scalar(self, ordinal: int, value: Any) -> None:
        """A result of the op at that ordinal that is no tensor, in order."""

    def digest(self, found_at: int, tensor: torch.Tensor, host_read: bool) -> None:
        """The tensor that the digest or host_read record at that ordinal is about."""


class NotingJudge(Judge):
    """Compares nothing: `notes` gets it. Raises ReplayMismatch where a result has another form."""

    def __init__(self, clock: Pausable, describe: Callable[[int], tuple[str, str]], notes: Notes) -> None:
        super().__init__(clock, describe)
        self._notes = notes

    def diverged(self, where: CompareLocation, expected: str, got: str, distance: SampleDistance | None = None) -> None:
        what, _scope = self._describe(where.ordinal)
        raise ReplayMismatch(
            f"ordinal {where.ordinal} ({what}) computes something of another form: expected {expected}, got {got}"
        )

    def scalar(self, where: CompareLocation, expected: Any, got: Any, *, read: bool, unsteady: bool) -> None:
        self._notes.scalar(where.ordinal, got)

    def digest(
        self, where: CompareLocation, expected: TensorDigest, tensor: torch.Tensor, *, host_read: bool, unsteady: bool
    ) -> None:
        self._clock.pause()
        self._notes.digest(where.found_at, tensor, host_read)
        self._clock.resume()


def digests_differ(expected: TensorDigest, got: TensorDigest, dtype: DType) -> tuple[str, str] | None:
    """The first difference between two digests of one dtype that is not close, as (expected, got); None if there is
    none."""
    tolerance = TOLERANCE.get(dtype)
    if tolerance is None:
        return _summary(expected), _summary(got)  # integers, bools and bit patterns: only the hash counts
    for name in ("elements", "nan", "inf"):
        if getattr(expected, name) != getattr(got, name):
            return f"{name} {getattr(expected, name)}", f"{name} {getattr(got, name)}"
    scale = _scale(expected, LARGEST[dtype])
    for name in ("min", "max", "mean"):
        mine, theirs = getattr(expected, name), getattr(got, name)
        if not _close(mine, theirs, tolerance, scale):
            return f"{name} {mine!r}", f"{name} {theirs!r}"
    if not _close(expected.l2, got.l2, tolerance, 0.0):
        return f"l2 {expected.l2!r}", f"l2 {got.l2!r}"
    for position, (mine, theirs) in enumerate(zip(expected.sample, got.sample, strict=True)):
        if not _close(mine, theirs, tolerance, scale):
            return f"sample[{position}] {mine!r}", f"sample[{position}] {theirs!r}"
    return None


def relative_distance(expected: TensorDigest, got: TensorDigest, dtype: DType) -> float | None:
    """The largest distance between numbers that two digests hold, relative as the tolerances are; None: no number."""
    scale = _scale(expected, LARGEST[dtype])
    pairs = [
        (mine, theirs)
        for mine, theirs in (
            *((getattr(expected, name), getattr(got, name)) for name in ("min", "max", "mean")),
            *zip(expected.sample, got.sample, strict=True),
        )
        if mine is not None and theirs is not None and cmath.isfinite(mine) and cmath.isfinite(theirs)
    ]
    apart = [abs(mine - theirs) / max(abs(mine), scale) for mine, theirs in pairs if mine != theirs]
    return max(apart, default=0.0) if pairs else None


def _scale(digest: TensorDigest, largest: float) -> float:
    """The root mean square of a digest's numbers, leaving out those from `largest` on; if there are any, it is that of
    the sample, the only other numbers known."""
    if digest.min is not None and digest.max is not None and max(-digest.min, digest.max) >= largest:
        rest = [abs(each) for each in digest.sample if abs(each) < largest]
        return math.sqrt(sum(each * each for each in rest) / len(rest)) if rest else 0.0
    finite = digest.elements - digest.nan - digest.inf
    return (digest.l2 or 0.0) / math.sqrt(finite) if finite > 0 else 0.0


def sample_distance(expected: TensorDigest, got: TensorDigest) -> SampleDistance | None:
    """How far apart two samples are; None if they cannot be compared."""
    if len(expected.sample) != len(got.sample) or not expected.sample:
        return None
    pairs = list(zip(expected.sample, got.sample, strict=True))
    differing = [(a, b) for a, b in pairs if not _same_scalar(a, b)]
    finite = [(a, b) for a, b in differing if cmath.isfinite(a) and cmath.isfinite(b)]
    absolute = max((abs(a - b) for a, b in finite), default=None)
    relative = max((abs(a - b) / abs(a) for a, b in finite if a), default=None)
    return SampleDistance(len(pairs), len(differing), absolute, relative)


def _summary(digest: TensorDigest) -> str:
    text = f"{digest.elements} elements, hash {digest.hex[:16]}"
    if digest.mean is not None and digest.l2 is not None:
        text += f", mean {digest.mean:.6g}, l2 {digest.l2:.6g}"
    return text


def _close(expected: complex | None, got: complex | None, tolerance: float, scale: float) -> bool:
    if expected is None or got is None:
        return expected is None and got is None
    if not (cmath.isfinite(expected) and cmath.isfinite(got)):
        return _same_scalar(expected, got)
    return abs(expected - got) <= tolerance * max(abs(expected), scale)


def _same_scalar(expected: Any, got: Any) -> bool:
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(map(_same_scalar, expected, got))
    if type(expected) is not type(got):
        return False
    if isinstance(expected, complex):
        return _same_scalar(expected.real, got.real) and _same_scalar(expected.imag, got.imag)
    if isinstance(expected, float):
        same_sign = math.copysign(1.0, expected) == math.copysign(1.0, got)  # 0.0 and -0.0 are not the same
        return (expected == got and same_sign) or (math.isnan(expected) and math.isnan(got))
    return bool(expected == got)


def _close_scalar(expected: Any, got: Any) -> bool:
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        return len(expected) == len(got) and all(map(_close_scalar, expected, got))
    if isinstance(expected, float | complex) and isinstance(got, int | float | complex):
        return _close(expected, got, _SCALAR_TOLERANCE, 0.0)
    return _same_scalar(expected, got)


def _scalar_distance(expected: Any, got: Any) -> SampleDistance | None:
    """How far two numbers are apart; None for other values, and where one is not finite."""
    numbers = (int, float, complex)
    if not isinstance(expected, numbers) or not isinstance(got, numbers):
        return None
    try:
        absolute = float(abs(expected - got))
        relative = float(absolute / abs(expected)) if expected else None
    except OverflowError:  # integers that no float holds
        return None
    return SampleDistance(1, 1, absolute, relative) if math.isfinite(absolute) else None


def environment_differences(reader: CaptureReader, devices: DeviceMap) -> list[str]:
    """Why results on this machine may differ from the captured ones bit for bit; empty if they should not."""
    session, here = reader.session, session_fields()
    differences = []

    def compare(name: str, captured: Any, present: Any) -> None:
        if captured != present:
            one, other = ("unset" if each is None else each for each in (present, captured))
            differences.append(f"{name} {one} here, {other} in the capture")

    compare("torch", session.torch_version, here["torch_version"])
    for name in sorted({*session.libraries, *here["libraries"]}):
        compare(name, session.libraries.get(name), here["libraries"].get(name))
    compare("CPU", session.cpu, here["cpu"])
    compare("CPU capability", session.cpu_capability, here["cpu_capability"])
    for captured, target in zip(devices.captured, devices.targets, strict=True):
        if captured is None or target is None or captured.kind == "meta":
            continue
        present = describe_device(target)
        if captured.kind != target.type:
            differences.append(f"{captured} is replayed on {target}")
        elif captured.kind != "cpu":
            compare(f"{captured}:", captured.name, present.name)
            then, now = (_properties(each.fingerprint) for each in (captured, present))
            for name in sorted({*then, *now}):
                compare(f"{captured}: {name}", then.get(name), now.get(name))
    if any(target is not None and target.type == "cuda" for target in devices.targets) and tunes_convolutions(reader):
        differences.append("torch.backends.cudnn.benchmark chooses the kernels of convolutions by their speed")
    elsewhere = session.policies.get(TRIMMED_ELSEWHERE)
    if elsewhere is not None:
        differences.append(f"its content comes from a replay that need not equal the capture ({elsewhere})")
    captured_threads = session.settings.get("num_threads")
    if captured_threads is not None:
        compare("threads", captured_threads, torch.get_num_threads())
    for name, value in replayed_settings({}).items():
        if name != "num_threads":
            compare(name, session.settings.get(name), value)
    return differences


def _properties(fingerprint: str) -> dict[str, Any]:
    """What a device's fingerprint says, by name; a file may hold any text."""
    try:
        properties = parse_json(fingerprint or "{}")
    except ValueError:
        properties = None
    return properties if isinstance(properties, dict) else {"fingerprint": fingerprint}


def tunes_convolutions(reader: CaptureReader) -> bool:
    """Whether cuDNN may have chosen the kernels of the capture's convolutions by their speed."""
    name = "cudnn_benchmark"
    changed = any(
        signature is not None
        and signature.kind is RecordKind.global_state
        and any(node.name == name for node in signature.args)
        for signature in reader.signatures
    )
    convolves = any(kernel is not None and "conv" in kernel.name for kernel in reader.kernels)
    return convolves and (changed or bool(reader.session.settings.get(name)))


def decide(asked: VerifyMode, differences: list[str], comparable: int, why_nothing: str) -> Verification:
    """Decide how to verify. `comparable` is how much the capture has to compare with."""
    if asked == "none":
        return Verification(asked, "none", ("verification was not asked for",))
    if comparable == 0:
        return Verification(asked, "none", (why_nothing,))
    if asked != "auto":
        return Verification(asked, asked, ("as asked",))
    if differences:
        return Verification(asked, "close", tuple(differences))
    return Verification(asked, "bitwise", ("same device, torch, libraries, thread count and CPU capability",))


# Keyed by memory, then by captured storage; the value is the index of an argument.
Memories = dict[int, dict[int, int]]


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor result. `shares` is the index of an argument tensor on the same storage, None if there is none.

    `storage` is the captured storage's id: argument tensors on other storages must not share memory with it.
    """

    view: View
    device: torch.device
    storage: int
    shares: int | None


@dataclass(eq=False)
class ExpectResults:
    """Called with what an op returned and its tensor arguments; returns the results. `storages` are the captured
    storages of the tensor arguments, None for arguments that the op moves to another storage.

    With `sizes_only` only the number of results, dtypes, sizes and devices are compared: for content that is not the
    captured content, and for captures that do not know everything about their results.
    """

    judge: Judge
    where: CompareLocation
    results: Sequence[NodePlace]
    expected: dict[int, ExpectedTensor]
    storages: Sequence[int | None]
    sizes_only: bool = False

    def __call__(self, returned: Any, *args: torch.Tensor) -> Any:
        self.judge.verification.structures += 1
        if len(self.results) == 0:
            values: Sequence[Any] = ()
            if returned is not None and not self.sizes_only:
                self._differs(None, "no result", _named(returned))
        elif len(self.results) == 1:
            values = (returned,)
        elif isinstance(returned, tuple | list) and len(returned) == len(self.results):
            values = returned
        else:
            self._differs(None, f"{len(self.results)} results", _named(returned))
            return returned
        memories = self._memories(args)
        for index, (place, value) in enumerate(zip(self.results, values, strict=True)):
            self._check(index, place, value, args, memories)
        return returned

    def _memories(self, args: tuple[torch.Tensor, ...]) -> Memories:
        """The captured storage and index of each argument that has memory, by its memory."""
        memories: Memories = {}
        if not self.sizes_only:
            for position, (storage, tensor) in enumerate(zip(self.storages, args, strict=True)):
                if storage is not None:
                    memories.setdefault(_memory(tensor), {}).setdefault(storage, position)
        return memories

    def _differs(self, index: int | None, expected: str, got: str) -> None:
        self.judge.diverged(replace(self.where, result=index), expected, got)

    def _check(
        self, index: int, place: NodePlace, value: Any, args: tuple[torch.Tensor, ...], memories: Memories
    ) -> None:
        kind = place.node.kind
        if kind is ValueKind.tensor:
            if not isinstance(value, torch.Tensor):
                self._differs(index, "a tensor", _named(value))
            else:
                self._check_tensor(index, self.expected[place.tensor_slot], value, args, memories)
        elif kind is ValueKind.none:
            # Not every capture has the numbers that ops returned; unknown ones are None.
            if value is not None and not isinstance(value, bool | int | float | complex):
                self._differs(index, "None", _named(value))
        elif kind in (ValueKind.list, ValueKind.tuple):
            if not isinstance(value, list | tuple) or len(value) != len(place.children):
                self._differs(index, f"{len(place.children)} values", _named(value))
                return
            for child, each in zip(place.children, value, strict=True):
                self._check(index, child, each, args, memories)

    def _check_tensor(
        self,
        index: int,
        expected: ExpectedTensor,
        tensor: torch.Tensor,
        args: tuple[torch.Tensor, ...],
        memories: Memories,
    ) -> None:
        if tensor.layout is not torch.strided:
            self._differs(index, "a strided tensor", _named(tensor))
            return
        view = expected.view
        sizes, strides = tuple(tensor.shape), tensor.stride()
        wanted = (view.dtype, view.sizes, telling_strides(view.sizes, view.strides), view.offset, expected.device)
        got = (tensor.dtype, sizes, telling_strides(sizes, strides), int(tensor.storage_offset()), tensor.device)
        if wanted != got and not (self.sizes_only and (wanted[0], wanted[1], wanted[4]) == (got[0], got[1], got[4])):
            self._differs(
                index,
                _tensor(view.dtype, view.sizes, view.strides, view.offset, expected.device),
                _tensor(tensor.dtype, sizes, strides, int(tensor.storage_offset()), tensor.device),
            )
            return
        if self.sizes_only:
            return
        memory = _memory(tensor)
        if expected.shares is not None and _memory(args[expected.shares]) != memory:
            self._differs(index, f"a view on tensor argument {expected.shares}", "memory of its own")
        for storage, position in memories.get(memory, {}).items():
            if storage != expected.storage:
                self._differs(index, "memory of its own", f"a view on tensor argument {position}")


def _memory(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors on the same memory."""
    return tensor.untyped_storage()._cdata


def telling_strides(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that matter: none for dimensions of one element, and none at all for an empty tensor."""
    if 0 in sizes:
        return ()
    return tuple(stride for size, stride in zip(sizes, strides, strict=True) if size != 1)


def _tensor(
    dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int, device: torch.device
) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{name}{list(sizes)} with strides {list(strides)} at offset {offset} on {device}"


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.layout).removeprefix('torch.')} tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    return "None" if value is None else type(value).__name__
