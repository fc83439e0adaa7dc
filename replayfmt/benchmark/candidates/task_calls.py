"""One call of a kernel and what it did, and what the reference does with every case. A part of check.py."""

from __future__ import annotations

import gc
import io
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replayfmt.pytorch.device_work import time_left
from replayfmt.pytorch.guards import CANARY, Memory
from replayfmt.pytorch.rounding import MARGIN, rounding_runs, spread_of, wide

from .task_cases import (
    CAPTURED,
    WIDENED,
    Arguments,
    Case,
    Options,
    Sizes,
    Variant,
    import_file,
    leaves,
    load_task,
    variants_of,
)

_TEXT_LIMIT = 400
_PART = 1 << 30  # bytes; a system reads no more than two of these at a time


@dataclass
class Outcome:
    """One call: its outputs, copies of them as they were when it returned, and its arguments' memory afterwards."""

    outputs: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)  # the argument storage that an output is on
    error: str = ""
    memory_error: bool = False


def memories_of(case: Case, contents: list[torch.Tensor], **how: Any) -> list[Memory]:
    found = []
    for place, (content, storage) in enumerate(zip(contents, case.workload["storages"], strict=True)):
        pages = how.get("pages", "")
        if pages and ":" in pages:
            number, _, side = pages.partition(":")
            pages = side if int(number) == place else ""
        shift = max(how["shift"], content.element_size()) if how.get("shift") else 0
        found.append(Memory(content, storage["device"], shift=shift, canary=how.get("canary", CANARY), pages=pages))
    return found


def run(function: Callable[..., Any], case: Case, memories: list[Memory], sizes: Sizes | None = None) -> Outcome:
    """Call a function once. Exceptions of the function become the outcome's error."""
    arguments = Arguments(case, memories, sizes)
    found = Outcome()
    try:
        returned = function(*arguments.positional, **arguments.named)
        _synchronize_current()
        found.outputs = leaves(returned)
        found.values = [each.detach().clone() if type(each) is torch.Tensor else each for each in found.outputs]
    except (Exception, SystemExit) as error:
        found.error = described(error)
        found.memory_error = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return found
    finally:
        synchronize()
    found.after = [memory.read() for memory in memories]
    found.places = [_place(each, memories) for each in found.outputs]
    return found


def _place(value: Any, memories: list[Memory]) -> int | None:
    if type(value) is not torch.Tensor or not value.numel():
        return None
    for place, memory in enumerate(memories):
        start = memory.tensor.data_ptr()
        if memory.tensor.device == value.device and start <= value.data_ptr() < start + max(memory.bytes, 1):
            return place
    return None


def described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f" ({os.path.basename(last.filename)}:{last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"[:_TEXT_LIMIT]


def _accelerated() -> bool:
    """Whether this process uses an accelerator. To ask whether there is one could begin to."""
    found = torch.accelerator.current_accelerator()
    return found is not None and getattr(torch.get_device_module(found), "is_initialized", lambda: True)()


def _synchronize_current() -> None:
    """Wait for the current stream alone: what another one does is not done when the function returns."""
    if _accelerated():
        torch.accelerator.current_stream().synchronize()


def synchronize() -> None:
    if _accelerated():
        torch.accelerator.synchronize()


def time_of(function: Callable[..., Any], given: list[Arguments], device: torch.device) -> tuple[int, Any]:
    """Nanoseconds of calls, and what the last one returned. On a device by events on the stream that is current before,
    and until every other stream is done, too."""
    returned, stream = None, None
    synchronize()
    if device.type != "cpu":
        stream = torch.accelerator.current_stream(device)
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record(stream)
    began = time.perf_counter_ns()
    for arguments in given:
        returned = function(*arguments.positional, **arguments.named)
    if stream is None:
        synchronize()
        return time.perf_counter_ns() - began, returned
    end.record(stream)
    end.synchronize()
    left = time_left([device])
    return int(begin.elapsed_time(end) * 1e6) + left, returned


def expectations(function: Callable[..., Any], case: Case, variant: Variant) -> dict[str, Any]:
    """What the reference does with a variant's inputs, and how far rounding moves its outputs."""
    contents = variant.contents(case)
    there = run(function, case, memories_of(case, contents), variant.sizes)
    if there.error:
        return {"error": there.error}
    found: dict[str, Any] = {
        "values": there.values,
        "forms": [form_of(each) for each in there.outputs],
        "after": there.after,
        "places": there.places,
        "written": [
            not torch.equal(before.view(torch.uint8), after)
            for before, after in zip(contents, there.after, strict=True)
        ],
        "error": "",
    }
    before = flat_outputs(there, contents)

    def outputs(taken: tuple[Any, ...], _named: dict[str, Any]) -> list[torch.Tensor] | None:
        pairs = zip(taken, contents, strict=True)
        widened = any(new.dtype is torch.float64 and old.dtype in WIDENED for new, old in pairs)
        memories = memories_of(case, list(taken))
        arguments = Arguments(case, memories, variant.sizes, widened)
        try:
            returned = leaves(function(*arguments.positional, **arguments.named))
        except Exception:
            return None
        again = Outcome(values=returned, after=[memory.read() for memory in memories])
        return flat_outputs(again, list(taken))

    widen = case.task["kind"] == "operator"
    runs = rounding_runs(outputs, tuple(contents), {}, widen=widen)
    spread = spread_of(before, runs)
    tolerances, correlated = [], []
    for place, value in enumerate(before):
        if not is_number(value):
            tolerances.append(0.0)
            correlated.append(True)
            continue
        exact = wide(value)
        own = spread.get(place)
        if own is None:
            finite = exact.abs()[exact.isfinite()]
            own = float(torch.finfo(value.dtype).eps) * (float(finite.max()) if finite.numel() else 0.0)
        tolerances.append(MARGIN * own)
        alike = [each[place] for each in runs if each is not None and each[place].shape == value.shape]
        # In double precision, which comes first where there is such a run: is the output more than rounding?
        correlated.append(all(correlation(exact, wide(each)) > 0.9 for each in (alike[:1] if widen else alike)))
    return {**found, "tolerances": tolerances, "correlated": correlated}


def survives(function: Callable[..., Any], case: Case, variant: Variant) -> bool:
    """Whether the reference takes a variant's inputs: with some sizes, kernels kill their process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)  # the other threads are not in a forked process, which would wait for them
            memories = memories_of(case, variant.contents(case))
            code = 1 if run(function, case, memories, variant.sizes).error else 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def flat_outputs(there: Outcome, contents: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results and then the arguments' memory, as flat tensors of their elements."""
    results = [each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in there.values]
    return results + [
        after.view(before.dtype) if after.numel() % before.element_size() == 0 else after
        for before, after in zip(contents, there.after, strict=True)
    ]


def is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two double-precision tensors; 1 where it has no meaning."""
    one, other = one.reshape(-1), other.reshape(-1)
    if one.is_complex():
        one, other = torch.view_as_real(one).reshape(-1), torch.view_as_real(other).reshape(-1)
    keep = one.isfinite() & other.isfinite()
    one, other = one[keep], other[keep]
    if one.numel() < 4:
        return 1.0
    one, other = one - one.mean(), other - other.mean()
    size = float(one.norm())
    if size <= 1e-12 * float(one.numel()) ** 0.5 * float(one.abs().max().clamp(min=1e-300)) or size == 0.0:
        return 1.0
    return float((one * other).sum()) / size / max(float(other.norm()), 1e-300)


@dataclass(frozen=True)
class Difference:
    """How far an output is off: `beyond` elements by more than `tolerance`, the worst at `index`."""

    where: str
    beyond: int
    elements: int
    index: list[int]
    expected: str
    got: str
    tolerance: float
    constant: bool
    not_finite: bool

    def __str__(self) -> str:
        allowed = f", where {self.tolerance:.3g} is allowed" if self.tolerance else ""
        return (
            f"{self.where}: {self.beyond} of {self.elements} elements are too far off, the worst at {self.index}: "
            f"expected {self.expected}, got {self.got}{allowed}"
        )


def difference(where: str, expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> Difference | None:
    """None if the tensors, of one dtype and as many elements, agree."""
    sizes = list(expected.shape)
    expected, got = expected.cpu().reshape(-1), got.cpu().reshape(-1)
    if is_number(expected):
        one, other = wide(expected), wide(got)
        same = (one == other) | (one.isnan() & other.isnan())
        finite = one.isfinite() & other.isfinite()
        apart = torch.where(finite, (one - other).abs(), torch.full_like(one.abs(), math.inf))
        beyond = ~same & (apart > tolerance)
        apart = torch.where(same, torch.zeros_like(apart), apart)
    else:
        beyond = expected.view(torch.uint8) != got.view(torch.uint8)
        beyond = beyond.view(expected.numel(), -1).any(1) if expected.numel() else beyond
        apart = beyond.to(torch.float64)
        finite = torch.ones_like(beyond)
    count = int(beyond.sum())
    if not count:
        return None
    place = int(torch.where(beyond, apart, torch.full_like(apart, -1.0)).argmax())
    constant = expected.numel() > 3 and bool((got == got[0]).all()) and not bool((expected == expected[0]).all())
    return Difference(
        where,
        count,
        expected.numel(),
        [int(each) for each in torch.unravel_index(torch.tensor(place), sizes)],
        number_text(expected[place]),
        number_text(got[place]),
        tolerance,
        constant,
        bool((beyond & ~finite).any()),
    )


def number_text(element: torch.Tensor) -> str:
    value = element.item() if element.dtype.itemsize > 1 or not element.is_floating_point() else float(element.float())
    return f"{value:.9g}" if isinstance(value, float | complex) else str(value)


def form_of(value: Any) -> str:
    """What later work relies on in a result, as text; strides where they matter."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    sizes = tuple(value.shape)
    strides = [s if size != 1 and 0 not in sizes else "-" for size, s in zip(sizes, value.stride(), strict=True)]
    flags = "".join(f", {flag}" for flag, is_set in (("conj", value.is_conj()), ("neg", value.is_neg())) if is_set)
    name = str(value.dtype).removeprefix("torch.")
    return f"{name}{list(sizes)} with strides [{', '.join(map(str, strides))}] on {value.device}{flags}"


class Task:
    """A task's folder with its reference, and what that does with every case."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder, self.options = Path(os.path.realpath(folder)), options
        self.task = load_task(self.folder)
        self.workloads = [each for each in self.task["workloads"] if options.only in each["name"]]
        if not self.workloads:
            raise ValueError(f"--workload={options.only}: no workload has such a name")
        self.scratch: Path = Path()
        self.taken: dict[str, list[str]] = {}  # by case, the variants that the reference takes
        self._kept = -1  # a file that is no longer in any folder: what the reference does with each
        self._places: dict[str, tuple[int, int]] = {}
        self.make: dict[str, Any] = {}  # how inputs without content are made

    def cases(self, make: Any) -> Iterator[Case]:
        for workload in self.workloads:
            for number in range(max(len(workload["cases"]), 1)):
                yield Case(self.folder, self.task, workload, number, make)

    def reference(self) -> Any:
        module = import_file(self.folder / "reference.py", "reference")
        del sys.modules["reference"]  # where a candidate would find it
        return module

    def prepare(self, tell: Callable[..., None]) -> None:
        """Run the reference on every case and variant; keeps what it does."""
        module = self.reference()
        # Before anything runs here: a process that has begun to use a device can fork none that does.
        alive = {
            (case.name, each.name)
            for case in self.cases(module.MAKE)
            for choices in variants_of(case, self.options.variants)
            for each in choices
            if each.sizes is not None and survives(module.PROGRAMS[case.workload["program"]], case, each)
        }
        kept = (self.scratch / "expected").open("wb")
        for case in self.cases(module.MAKE):
            function = module.PROGRAMS[case.workload["program"]]
            found = {CAPTURED.name: expectations(function, case, CAPTURED)}
            if found[CAPTURED.name]["error"]:
                tell(event="reference", case=case.name, wrong=found[CAPTURED.name]["error"])
                continue
            tell(event="reference", case=case.name, wrong=self._against_file(case, found[CAPTURED.name]))
            variants: list[Variant] = []
            for choices in variants_of(case, self.options.variants):
                for variant in choices:
                    if variant.sizes is not None and (case.name, variant.name) not in alive:
                        continue
                    there = expectations(function, case, variant)
                    if not there["error"]:
                        found[variant.name] = there
                        variants.append(variant)
                        break
            for name, there in found.items():
                first = kept.tell()
                torch.save(there, kept)
                tell(event="kept", name=f"{case.name} {name}", place=(first, kept.tell() - first))
            tell(event="taken", case=case.name, variants=[each.name for each in variants])
        kept.close()

    def take(self, events: list[dict[str, Any]]) -> None:
        """Remember what was kept, so that no candidate can change it."""
        path = self.scratch / "expected"
        self._kept = os.open(path, os.O_RDONLY)
        path.unlink()
        self._places = {each["name"]: tuple(each["place"]) for each in events if each["event"] == "kept"}
        self.taken = {each["case"]: each["variants"] for each in events if each["event"] == "taken"}

    def _against_file(self, case: Case, here: dict[str, Any]) -> str:
        """How the reference's outputs differ from those in the file. Where they agree, the file's are the expected
        ones."""
        outputs = case.outputs()
        for place, value in enumerate(here["values"]):
            kept = case.like(outputs, f"result.{place}", value) if isinstance(value, torch.Tensor) else None
            if kept is None:
                continue
            off = difference(f"result {place}", kept, value, here["tolerances"][place])
            if off is not None:
                return f"the reference gives other outputs here than in the capture: {off}"
            value.copy_(kept)
        for place, storage in enumerate(case.workload["storages"]):
            after = here["after"][place].view(case.contents[place].dtype)
            kept = case.like(outputs, f"written.{storage['entry'].removeprefix('input.')}", after)
            if kept is not None:
                tolerance = here["tolerances"][len(here["values"]) + place]
                off = difference(f"argument {case.names(place)}", kept, after, tolerance)
                if off is not None:
                    return f"the reference writes something else here than in the capture: {off}"
        return ""

    def variants(self, case: Case) -> list[Variant] | None:
        """The variants that the reference takes; None where it does not take the captured inputs."""
        names = self.taken.get(case.name)
        if names is None:
            return None
        return [each for choices in variants_of(case, self.options.variants) for each in choices if each.name in names]

    def expected(self, case: Case, variant: Variant) -> dict[str, Any]:
        collects = gc.isenabled()
        gc.disable()
        try:
            first, length = self._places[f"{case.name} {variant.name}"]
            data = b"".join(
                os.pread(self._kept, min(_PART, first + length - at), at) for at in range(first, first + length, _PART)
            )
            found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        finally:
            if collects:
                gc.enable()
        gc.collect(0)  # what read it refers to it, and to itself
        return found
