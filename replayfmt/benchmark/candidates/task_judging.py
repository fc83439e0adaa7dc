"""Judges a kernel in its own process: its behaviour, its results, and the time of its calls. A part of check.py."""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import json
import math
import operator
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ExecutionTraceObserver

from replayfmt.pytorch.guards import Memory, poisoned
from replayfmt.pytorch.rounding import wide

from .task_calls import (
    Difference,
    Outcome,
    Task,
    correlation,
    described,
    difference,
    flat_outputs,
    form_of,
    is_number,
    memories_of,
    number_text,
    run,
    time_of,
)
from .task_cases import CAPTURED, Arguments, Case, Variant, import_file, is_float, leaves

# Why a kernel is rejected; of several reasons the first in this list is the verdict.
REASONS = {
    "does not load": "the file cannot be imported or built, or has no such function",
    "crashed": "the process died",
    "out of time": "it took longer than allowed",
    "out of memory": "it needs more memory than allowed",
    "reads the task": "it opened the task's inputs, expected outputs or reference, or looked at the judge's objects",
    "calls the original": "it calls the operator that it is to replace",
    "global state": "it leaves a setting of the process, a random generator or a function changed",
    "late work": "it goes on working after it has returned",
    "lazy": "it returns something that is not a plain tensor, and may not be computed yet",
    "writes outside": "it writes beside its arguments",
    "reads outside": "its outputs depend on memory beside its arguments",
    "mutates inputs": "it writes an argument that the original does not write",
    "raises": "it raises an exception where the original does not",
    "structure": "number, dtype, sizes, strides or device of its outputs are not the original's",
    "aliasing": "an output is on an argument's memory where the original's is not, or the other way round",
    "reuses memory": "two calls return the same memory",
    "cached": "it returns the result of an earlier call",
    "computes once": "it is right in its first call only",
    "uninitialized": "its outputs depend on memory that nothing wrote",
    "alignment": "it is right at aligned addresses only",
    "uncorrelated": "an output has nothing to do with the expected one, however close it is",
    "captured values only": "it is right for the captured values only",
    "wrong": "an output is farther off than rounding explains",
}
SOURCES = (".py", ".cpp", ".cc", ".cu", ".cubin")
_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")
_LOOKS = ("sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents")
_FIRST_CALL = "the first call"
_LEAST_ROUNDS, _MOST_ROUNDS = 7, 250
_JUDGED = 0.1  # the share of timed calls whose outputs are judged
_FEW_BYTES = 1 << 20  # of inputs: there are several sets of them


class Fault(Exception):
    """A finding on a candidate."""

    def __init__(self, reason: str, text: str, worst: Difference | None = None) -> None:
        assert reason in REASONS
        super().__init__(text)
        self.reason, self.text, self.worst = reason, text, worst

    def event(self, case: str) -> dict[str, Any]:
        """What the parent process is told."""
        worst = None if self.worst is None else vars(self.worst)
        return {"event": "fault", "case": case, "reason": self.reason, "text": self.text, "worst": worst}


class State:
    """The state of this process that a kernel must leave as it is."""

    _OWNERS: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, torch.accelerator, torch.cuda, torch.storage)
    _OWNERS += (
        torch.Event,
        torch.Stream,
        torch.cuda.Event,
        torch.autograd.profiler,
        builtins,
        ctypes,
        json,
        math,
        os,
        random,
        threading,
        time,
    )

    def __init__(self) -> None:
        own = vars(sys.modules[__name__])
        self._data = {name: value for name, value in own.items() if not callable(value) and not name.startswith("__")}
        self._texts = {name: repr(value) for name, value in self._data.items()}
        classes = [value for value in own.values() if isinstance(value, type) and value.__module__ == __name__]
        self._functions = [_Functions(owner) for owner in (*self._OWNERS, sys.modules[__name__], *classes)]
        self._kernels = frozenset(torch.library._impls)
        # Inductor passes addresses of this process on to what it compiles.
        self._variables = {name: value for name, value in os.environ.items() if not name.startswith("_TORCHINDUCTOR_")}
        self._before = self._read()

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "default dtype": torch.get_default_dtype(),
            "default device": str(torch.get_default_device()),
            "threads": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32 matmul precision": torch.get_float32_matmul_precision(),
            "TF32 of cuDNN": torch.backends.cudnn.allow_tf32,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.enabled": torch.backends.cudnn.enabled,
            "mkldnn": torch.backends.mkldnn.enabled,
            "flush denormal": float(torch.tensor([1e-310], dtype=torch.float64, device="cpu") * 1.0) == 0.0,
            "filling of new memory": torch._C._get_deterministic_fill_uninitialized_memory(),
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "anomaly detection": torch.is_anomaly_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            "random generator": torch.get_rng_state().tolist(),
            "Python's random generator": random.getstate(),
            "garbage collection": gc.isenabled(),
            "time slices of threads": sys.getswitchinterval(),
            "signals": [*map(signal.getsignal, sorted(signal.valid_signals())), signal.getitimer(signal.ITIMER_REAL)],
            "working directory": os.getcwd(),
        }
        found |= {"a tracer": sys.gettrace(), "a profiler": sys.getprofile()}
        if "numpy" in sys.modules:
            numbers = importlib.import_module("numpy.random")
            kind, keys, *rest = numbers.get_state()
            found["NumPy's random generator"] = (kind, keys.tobytes(), *rest)
        return found

    def changes(self) -> list[str]:
        after = self._read()
        found = [name for name, value in self._before.items() if after[name] is not value and after[name] != value]
        data = vars(sys.modules[__name__])
        for name, value in self._data.items():
            if data.get(name) is not value or repr(value) != self._texts[name]:
                found.append(f"{name} of check.py")
        variables = [name for name, value in self._variables.items() if os.environ.get(name) != value]
        if variables:
            found.append(f"environment variables ({', '.join(variables)})")
        # PyTorch's own operators may not get other kernels: the original would compute, or take, something else. Those
        # for transforms, which PyTorch adds when one is first used, are not the original's.
        if any(re.match(r"aten/.*/(?!FuncTorch)", each) for each in self._kernels ^ torch.library._impls):
            found.append("kernels of PyTorch's operators")
        return found + [name for each in self._functions for name in each.changes()]


def _is_hidden(there: Any, value: Any) -> bool:
    """Whether PyTorch replaced a function so that its compiler does not see it, as it does when that is imported."""
    file = getattr(getattr(there, "__code__", None), "co_filename", "")
    return file == os.path.join(os.path.dirname(torch.__file__), "_compile.py") and there.__wrapped__ is value


class _Functions:
    """The functions and classes of a module or class, with those that it inherits, as they are now."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._spaces = []
        self._names: set[str] = set()
        for kind in owner.__mro__[:-1] if isinstance(owner, type) else (owner,):
            kinds = property | classmethod | staticmethod
            names = [name for name, value in vars(kind).items() if callable(value) or isinstance(value, kinds)]
            values = [vars(kind)[name] for name in names]
            self._spaces.append((vars(kind), frozenset(vars(kind)), names, values, _codes(values)))
            self._names.update(names)

    def changes(self) -> Iterator[str]:
        called = self._owner.__name__.replace("__main__", "check.py")
        for space, known, names, values, codes in self._spaces:
            yield from (f"{called}.{name}" for name in (space.keys() - known) & self._names)  # before what it inherits
            there = list(map(space.get, names))
            # By identity: what was put in place of something may call itself equal to it.
            if all(map(operator.is_, there, values)) and all(map(operator.is_, _codes(values), codes)):
                continue
            for name, now, value, code, before in zip(names, there, values, _codes(values), codes, strict=True):
                if (now is not value or code is not before) and not _is_hidden(now, value):
                    yield f"{called}.{name}"


def _codes(values: list[Any]) -> list[Any]:
    return [getattr(value, "__code__", None) for value in values]


class Judge:
    """Judges one candidate, in a process of its own. `tell` reports an event to the parent process."""

    def __init__(self, task: Task, tell: Callable[..., None]) -> None:
        self.task, self.tell = task, tell
        self.armed = False
        self.alignment = 1  # bytes that addresses of its arguments may count on, if more than one element
        self._looked: list[str] = []
        self._own = ""
        self.seen: set[int] = set()  # hashes of what it rightly returned in earlier cases
        self.changes = State().changes  # of the functions as they are now

    def note(self, fault: Fault, case: str = "") -> None:
        """Raises what was found, unless that is allowed: what else is wrong is found, too."""
        if fault.reason not in self.task.options.allow:
            raise fault
        self.tell(**fault.event(case))

    def load(self, given: str) -> Callable[..., Any]:
        path, function = split_candidate(given)
        name = function or self.task.task["function"]
        self._own = os.path.realpath(path)
        if not path.endswith(SOURCES):
            raise Fault("does not load", f"{os.path.basename(path)} is none of {', '.join(SOURCES)}")
        if path.endswith(".cubin"):
            return self._launched(path, function)
        if path.endswith(".cu") and not torch.cuda.is_available():
            raise Fault("does not load", "a CUDA source needs a CUDA device, and PyTorch sees none here")
        sys.addaudithook(self._audit)
        settled = self.settled
        self.armed = True
        try:
            if path.endswith(".py"):
                module = import_file(Path(path), "candidate")
            else:
                from torch.utils.cpp_extension import load

                module = load(f"candidate_{abs(hash(self._own))}", [path], verbose=False)
        except (Exception, SystemExit) as error:
            raise Fault("does not load", described(error)) from None
        finally:
            self.armed = False
        found = getattr(module, name, None)
        if not callable(found):
            there = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            raise Fault("does not load", f"it has no function {name!r}, but {', '.join(there[:8]) or 'none'}")
        try:
            settled("while it was loaded")
        except Fault as fault:
            self.note(fault)
        return found

    def _launched(self, path: str, entry: str) -> Callable[..., Any]:
        self.alignment = 16  # a binary by Triton is for addresses that were aligned so, or not, when it was compiled
        try:
            from replayfmt.benchmark.candidates.binaries import launched
        except ImportError as error:
            raise Fault("does not load", f"OpReplay launches a cubin, and cannot be imported: {error}") from None
        try:
            return launched(self.task.folder, self.task.task, path, entry)
        except ValueError as error:
            raise Fault("does not load", f"{os.path.basename(path)}: {error}") from None

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Python calls this before some actions. What a candidate may not do is told at once, and it is refused."""
        if not self.armed or "reads the task" in self.task.options.allow:
            return
        found = ""
        if event == "open" and isinstance(args[0], str | bytes):
            found = self._opens(os.path.realpath(os.fsdecode(args[0])))
        elif event in _STARTS and str(self.task.folder) in str(args[:2]):
            found = "it started a program with the task's files"
        elif event in _LOOKS and self._by_candidate():
            found = f"it called {event}"
        elif event in ("os.kill", "os.killpg") and args[0] in (os.getppid(), os.getpgid(os.getppid()), 0, -1):
            found = "it sent a signal to the judge"
        if found:
            self.tell(**Fault("reads the task", found).event(""))
            self._looked.append(found)
            raise PermissionError(found)

    def _opens(self, path: str) -> str:
        inside = Path(path).is_relative_to(self.task.folder) and (
            path.endswith((".safetensors", ".json")) or os.path.basename(path) in ("reference.py", "check.py")
        )
        if path == self._own or not (inside or Path(path).is_relative_to(self.task.scratch)):
            return ""
        return f"it opened {os.path.basename(path)}"

    def _by_candidate(self) -> bool:
        """Whether the candidate itself asks Python for something, also by a function of `inspect`."""
        self.armed = False
        frame: Any = sys._getframe(2)
        self.armed = True
        while frame is not None and frame.f_globals.get("__name__") in ("inspect", "traceback"):
            frame = frame.f_back
        return frame is not None and self._is_own(frame.f_code.co_filename)

    def _is_own(self, file: str) -> bool:
        """Whether a file is the candidate's, or is not there: it made the code as it ran."""
        return os.path.realpath(file) == self._own or not (os.path.exists(file) or file.startswith("<frozen"))

    def settled(self, when: str) -> None:
        """Raises Fault if the process is not as it was, or something in it was looked at."""
        if self._looked:
            raise Fault("reads the task", f"{self._looked[0]} {when}")
        changes = self.changes()
        if changes:
            more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
            raise Fault("global state", f"it changed {', '.join(changes[:4])}{more} {when}")

    def runs_on(self) -> bool:
        """Whether code of the candidate's runs in another thread or process. Compilers have threads and processes of
        their own, which wait."""
        frames = sys._current_frames()
        del frames[threading.get_ident()]  # which refers to itself from here
        for top in frames.values():
            frame: Any = top
            while frame is not None:
                if self._is_own(frame.f_code.co_filename):
                    return True
                frame = frame.f_back
        return any(_command(child) == _command(os.getpid()) for child in _children())


def _children() -> list[int]:
    """The processes that this one has started, where the system tells."""
    files = Path("/proc/self/task").glob("*/children")
    return [int(each) for file in files for each in file.read_text().split()]


def _command(process: int) -> bytes:
    """What it was started with: a process that was forked has what its parent has."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


class CaseJudge:
    """Judges a candidate in one case, with its captured inputs and `variants` of them; without a list of these, calls
    are only timed. What is expected is read after a call, and no longer there in the next one, which could find it."""

    def __init__(self, judge: Judge, function: Callable[..., Any], case: Case, variants: list[Variant] | None) -> None:
        self._judge, self._function, self._case = judge, function, case
        self._settled = judge.settled
        self._judges, self._variants = variants is not None, variants or []
        self._other = next((each for each in self._variants if each.change is not None), None)
        self._read: dict[str, dict[str, Any]] = {}  # what is expected, by variant, since the last call
        self._calls: list[tuple[str, Outcome]] = []
        least = "one element" if judge.alignment == 1 else f"{judge.alignment} bytes"
        self._shifted = f"at addresses that are aligned to {least} only"

    def _note(self, fault: Fault) -> None:
        self._judge.note(fault, self._case.name)

    def judge(self) -> None:
        """Raises Fault for the first thing that is wrong with the captured inputs of a workload, or with others."""
        case, other, options = self._case, self._other, self._judge.task.options
        memories = memories_of(case, case.contents)
        first = self._call(_FIRST_CALL, CAPTURED, memories)
        second = None
        if other is not None:
            for memory, content in zip(memories, other.contents(case), strict=True):
                memory.write(content)
            second = self._call("a call with other values at the same addresses", other, memories)
            self._own_memory(first, second)
        memories = memories_of(case, case.contents, shift=self._judge.alignment)
        shifted = self._call(f"a call {self._shifted}", CAPTURED, memories)
        memories = memories_of(case, case.contents, canary=0)
        clean = self._call("a call with clean memory", CAPTURED, memories, poison=False)
        self._values(first, second, shifted, clean)
        time.sleep(0.002)
        for what, found in self._calls:
            self._unchanged(what, found)
        for variant in self._variants:
            if variant is not other:
                memories = memories_of(case, variant.contents(case))
                found = self._call(f"a call with {variant.name}", variant, memories)
                self._equal(variant, found, "captured values only")
        for side in ("after", "before") if options.guard else ():
            if options.pages and not options.pages.endswith(side):
                continue
            memories = memories_of(case, case.contents, pages=options.pages or side)
            found = self._call(f"a call between unreadable pages ({side})", CAPTURED, memories)
            self._equal(CAPTURED, found, "reads outside")

    def _call(self, what: str, variant: Variant, memories: list[Memory], poison: bool = True) -> Outcome:
        self._judge.tell(event="call", case=self._case.name, call=what)
        contents = variant.contents(self._case)
        self._read.clear()
        with poisoned(poison), self._watched():
            found = run(self._function, self._case, memories, variant.sizes)
        try:
            self._settled(f"in {what}")
        except Fault as fault:
            self._note(fault)
        self._behaved(what, contents, memories, found, self._expected(variant))
        self._calls.append((what, found))
        return found

    def _expected(self, variant: Variant) -> dict[str, Any]:
        if variant.name not in self._read:
            self._read[variant.name] = self._judge.task.expected(self._case, variant)
        return self._read[variant.name]

    def _behaved(
        self, what: str, contents: list[torch.Tensor], memories: list[Memory], found: Outcome, expected: dict[str, Any]
    ) -> None:
        if found.error:
            reason = "out of memory" if found.memory_error else "alignment" if self._shifted in what else "raises"
            self._note(Fault(reason, f"in {what}: {found.error}"))
            return
        if self._judge.runs_on():
            self._note(Fault("late work", f"a thread that it started in {what} still runs when it has returned"))
        for place, memory in enumerate(memories):
            side = memory.overwritten()
            if side:
                self._note(Fault("writes outside", f"in {what} it wrote {side} argument {self._case.names(place)}"))
        for place, (content, after) in enumerate(zip(contents, found.after, strict=True)):
            if not expected["written"][place] and not torch.equal(content.view(torch.uint8), after):
                self._note(Fault("mutates inputs", f"in {what} it wrote argument {self._case.names(place)}"))
        self._structure(what, found, expected)

    def _structure(self, what: str, found: Outcome, expected: dict[str, Any]) -> None:
        count, wanted = len(found.outputs), len(expected["values"])
        if count != wanted:
            raise Fault("structure", f"in {what} it returned {count} values, not {wanted}")
        for place, (value, wanted) in enumerate(zip(found.outputs, expected["values"], strict=True)):
            where = f"result {place} in {what}"
            if not isinstance(wanted, torch.Tensor):
                if type(value) is not type(wanted):
                    raise Fault("structure", f"{where} is a {type(value).__name__}, not a {type(wanted).__name__}")
                continue
            if type(value) is not torch.Tensor:
                lazy = isinstance(value, torch.Tensor) or hasattr(type(value), "__torch_function__") or callable(value)
                text = f"{where} is a {type(value).__name__}, not a torch.Tensor"
                raise Fault("lazy" if lazy else "structure", text)
            if form_of(value) != expected["forms"][place]:
                other = Fault("structure", f"{where} is {form_of(value)}, not {expected['forms'][place]}")
                if (value.dtype, value.shape) != (wanted.dtype, wanted.shape):
                    raise other
                self._note(other)
            if found.places[place] != expected["places"][place]:
                on = found.places[place]
                text = "memory of its own" if on is None else f"the memory of argument {self._case.names(on)}"
                self._note(Fault("aliasing", f"{where} is on {text}"))

    def _own_memory(self, first: Outcome, second: Outcome) -> None:
        known = {each.untyped_storage().data_ptr() for each in _fresh(first) if each.numel()}
        if any(each.untyped_storage().data_ptr() in known for each in _fresh(second) if each.numel()):
            if all(map(torch.equal, _tensors_of(first.values), _tensors_of(second.values))):
                raise Fault("cached", "a second call with other inputs returned the first call's result")
            self._note(Fault("reuses memory", "a second call returned the memory that the first call had returned"))

    def _unchanged(self, what: str, found: Outcome) -> None:
        for place, (value, copy) in enumerate(zip(found.outputs, found.values, strict=True)):
            if isinstance(value, torch.Tensor) and found.places[place] is None:
                now, then = (each.contiguous().view(-1).view(torch.uint8) for each in (value, copy))
                if not torch.equal(now, then):
                    self._note(Fault("late work", f"result {place} of {what} changed after it was returned"))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The candidate runs. Raises Fault afterwards if it called the operator that it replaces: PyTorch writes the
        operators of all threads to a file, and no function says that it does."""
        task, path = self._judge.task, self._judge.task.scratch / f"calls-{os.getpid()}"
        original = task.task["operator"] or ""
        if task.task["kind"] != "operator" or "calls the original" in task.options.allow:
            self._judge.armed = True
            try:
                yield
            finally:
                self._judge.armed = False
            return
        watch = ExecutionTraceObserver().register_callback(str(path))
        watch.start()
        self._judge.armed = True
        try:
            yield
        finally:
            self._judge.armed = False
            watch.stop()
            watch.unregister_callback()
        names = re.findall(r'"name": "([^"]*)"', path.read_text(encoding="utf-8"))
        path.unlink()  # to write over a file can take longer than a new one
        called = any(name.rstrip("_") == original.rstrip("_") for name in names)
        if called:
            raise Fault("calls the original", f"it calls {original}")

    def _values(self, first: Outcome, second: Outcome | None, shifted: Outcome, clean: Outcome) -> None:
        off, off_shifted, off_clean = (self._off(CAPTURED, found) for found in (first, shifted, clean))
        if off is not None:
            if _hash(first) in self._judge.seen:
                raise Fault("cached", f"it returned what it had returned for other inputs: {off}", off)
            if off_clean is None or (off.not_finite and not off_clean.not_finite):
                self._read.clear()
                with poisoned(True):  # and zeros beside the arguments
                    again = run(self._function, self._case, memories_of(self._case, self._case.contents, canary=0))
                if self._off(CAPTURED, again) is None:
                    raise Fault("reads outside", f"memory beside its arguments changes its outputs: {off}", off)
                raise Fault("uninitialized", f"memory that was never written changes its outputs: {off}", off)
            raise Fault("uncorrelated" if off.constant else "wrong", str(off), off)
        self._judge.seen.add(_hash(first))
        if not first.error:
            self._related(self._expected(CAPTURED), first)
        if self._other is not None and second is not None:
            off = self._off(self._other, second)
            if off is not None:
                if _same_values(first, second):
                    raise Fault("cached", f"a call with other inputs returned the first call's result: {off}", off)
                if off_shifted is not None or off_clean is not None:
                    raise Fault("computes once", f"a second call is wrong: {off}", off)
                raise Fault("captured values only", f"with other values of the same distribution: {off}", off)
        if off_shifted is not None:
            if off_clean is not None:
                raise Fault("computes once", f"a third call is wrong: {off_shifted}", off_shifted)
            raise Fault("alignment", f"{self._shifted}: {off_shifted}", off_shifted)
        if off_clean is not None:
            raise Fault("computes once", f"a fourth call is wrong: {off_clean}", off_clean)

    def _equal(self, variant: Variant, found: Outcome, reason: str) -> None:
        off = self._off(variant, found)
        if off is not None:
            raise Fault(reason, f"with {variant.name}: {off}", off)

    def _off(self, variant: Variant, found: Outcome) -> Difference | None:
        """The first output that is too far off. None where there is none, as it raised."""
        return None if found.error else self._apart(self._expected(variant), variant.contents(self._case), found)

    def _apart(self, expected: dict[str, Any], contents: list[torch.Tensor], found: Outcome) -> Difference | None:
        wanted = flat_outputs(Outcome(values=expected["values"], after=expected["after"]), contents)
        got = flat_outputs(found, contents)
        results = len(expected["values"])
        for place, (one, other) in enumerate(zip(wanted, got, strict=True)):
            if place >= results and not expected["written"][place - results]:
                continue
            where = f"result {place}" if place < results else f"argument {self._case.names(place - results)}"
            off = difference(where, one, other, expected["tolerances"][place])
            if off is not None:
                return off
        return None

    def _related(self, expected: dict[str, Any], found: Outcome) -> None:
        """Raises Fault for a floating-point output that is within its tolerance for another reason than being right: it
        is constant, has nothing to do with the expected one, or is another multiple of it."""
        for place, (one, other) in enumerate(zip(expected["values"], found.values, strict=True)):
            if not isinstance(one, torch.Tensor) or not is_number(one) or one.numel() < 4:
                continue
            wanted, got = wide(one.cpu()).reshape(-1), wide(other.cpu()).reshape(-1)
            where = f"result {place} is within the tolerance, and"
            if bool((got == got[0]).all()) and not bool((wanted == wanted[0]).all()):
                raise Fault("uncorrelated", f"{where} all its elements are {number_text(got[0])}")
            if not expected["correlated"][place]:
                continue
            seen = correlation(wanted, got)
            if seen < 0.5:
                raise Fault("uncorrelated", f"{where} its correlation with the expected one is {seen:.2g}")
            finite = wanted.isfinite() & got.isfinite()
            wanted, got = wanted[finite], got[finite]
            square = float((wanted.conj() * wanted).real.sum())
            if wanted.numel() < 16 or not square:
                continue
            factor = float((wanted.conj() * got).real.sum()) / square
            # Errors that have nothing to do with each other hardly change the multiple.
            chance = 3 * expected["tolerances"][place] / math.sqrt(square)
            if abs(factor - 1) > 4 * float(torch.finfo(one.dtype).eps) + chance:
                raise Fault("wrong", f"{where} it is {factor:.4g} times the expected one")

    def measure(self, reference: Callable[..., Any]) -> dict[str, Any]:
        """Nanoseconds of calls of both, in alternation. Before each call its inputs change, at the same addresses, to
        values that they never had, so that nothing that is kept from an earlier one can be right; after some calls,
        which nobody can foretell, and after the last one the candidate's outputs are judged. Some more calls are not
        timed but watched. Raises Fault."""
        variants = [CAPTURED] if self._other is None else [CAPTURED, self._other]
        inputs = _TimedInputs(self._case, [each.contents(self._case) for each in variants])
        options, flush = self._judge.task.options, None
        if options.cold_bytes:
            flush = torch.zeros(options.cold_bytes, dtype=torch.uint8, device=inputs.device)
        times: dict[str, list[int]] = {"candidate": [], "reference": []}
        sides = [("candidate", self._function), ("reference", reference)]
        for _warmup in range(2):
            took = {name: self._timed(each, reference, inputs, 1, None)[0] for name, each in sides}
        repeat = 1 if flush is not None else max(1, min(len(inputs.sets), 20_000 // max(min(took.values()), 1)))
        began, rounds, last, chance = time.perf_counter(), 0, False, random.SystemRandom()
        watched = chance.randrange(_LEAST_ROUNDS)
        while not last:
            for name, each in sides if rounds % 2 else sides[::-1]:
                if name == "candidate" and self._judges and (rounds == watched or chance.random() < _JUDGED):
                    with self._watched():
                        self._timed(each, reference, inputs, 1, None)
                taken, returned, memories = self._timed(each, reference, inputs, repeat, flush)
                times[name].append(taken // repeat)
                if name == "reference":
                    continue
                spent = time.perf_counter() - began
                last = rounds + 1 >= _LEAST_ROUNDS and (spent > options.min_time_s or rounds + 1 >= _MOST_ROUNDS)
                if self._judges and (last or chance.random() < _JUDGED):
                    # At once: what still works on them has been too late.
                    values = [each.clone() if type(each) is torch.Tensor else each for each in leaves(returned)]
                    found = Outcome(values=values, after=[memory.read() for memory in memories])
                    if self._judge.runs_on():
                        raise Fault("late work", "a thread that it started in a timed call still runs")
                    self._timed_rightly(reference, variants[inputs.now], inputs.contents(repeat - 1), found)
            rounds += 1
        return {
            "times_ns": times,
            "rounds": rounds,
            "calls_together": repeat,
            "inputs": "hot" if flush is None else "cold",
        }

    def _timed_rightly(
        self, reference: Callable[..., Any], variant: Variant, contents: list[torch.Tensor], found: Outcome
    ) -> None:
        there = run(reference, self._case, memories_of(self._case, contents))
        expected = self._expected(variant) | {"values": there.values, "after": there.after}
        off = self._apart(expected, contents, found)
        if off is not None:
            raise Fault("cached", f"in a timed call with inputs that had changed: {off}", off)

    def _timed(
        self,
        function: Callable[..., Any],
        reference: Callable[..., Any],
        inputs: _TimedInputs,
        repeat: int,
        flush: torch.Tensor | None,
    ) -> tuple[int, Any, list[Memory]]:
        """Nanoseconds of calls on so many sets of inputs; what the last one returned, and its memory."""
        given = inputs.change(repeat)
        self._read.clear()
        if flush is not None:
            flush.add_(1)
        self._judge.armed = self._judges and function is self._function
        try:
            taken, returned = time_of(function, given, inputs.device)
        except Exception:
            contents = (inputs.contents(number) for number in range(repeat))
            if inputs.fresh and any(
                run(reference, self._case, memories_of(self._case, each)).error for each in contents
            ):
                inputs.fresh = False  # these values mean nothing to the original
                return self._timed(function, reference, inputs, repeat, flush)
            raise
        finally:
            self._judge.armed = False
        return taken, returned, inputs.sets[repeat - 1]


class _TimedInputs:
    """Some sets of inputs, each of which changes before it is used again. `now`: which contents they have; with `fresh`
    one element of each floating-point storage is another one, too, each time."""

    def __init__(self, case: Case, contents: list[list[torch.Tensor]]) -> None:
        size = sum(each.nbytes for each in contents[0])
        self._contents, self.now, self.fresh = contents, 0, True
        self._random = random.Random()
        self.sets = [memories_of(case, contents[0]) for _ in range(8 if size < _FEW_BYTES else 1)]
        self._changed: list[list[torch.Tensor]] = [[] for _ in self.sets]
        self._arguments = [Arguments(case, memories) for memories in self.sets]
        self.device = self.sets[0][0].tensor.device if self.sets[0] else torch.device("cpu")

    def change(self, count: int) -> list[Arguments]:
        """The first sets, with other contents than before."""
        self.now = (self.now + 1) % len(self._contents)
        for number, memories in enumerate(self.sets[:count]):
            self._changed[number] = [self._another(each) for each in self._contents[self.now]]
            for memory, content in zip(memories, self._changed[number], strict=True):
                memory.write(content)
        return self._arguments[:count]

    def contents(self, number: int) -> list[torch.Tensor]:
        """The contents of a set, as they were before the call."""
        return self._changed[number]

    def _another(self, content: torch.Tensor) -> torch.Tensor:
        if not (self.fresh and is_float(content) and content.numel()):
            return content
        content = content.clone()
        places = [self._random.randrange(content.numel()) for _ in range(2)]
        content[places[0]] = content[places[1]] * self._random.uniform(0.5, 1.0)
        return content


def _hash(found: Outcome) -> int:
    flat = [each.cpu().contiguous() for each in _tensors_of(found.values)]
    return hash(tuple(ctypes.string_at(each.data_ptr() if each.numel() else 0, each.nbytes) for each in flat))


def _same_values(one: Outcome, other: Outcome) -> bool:
    pairs = zip(_tensors_of(one.values), _tensors_of(other.values), strict=True)
    return bool(one.values) and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _tensors_of(values: list[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]


def _fresh(found: Outcome) -> list[torch.Tensor]:
    pairs = zip(found.outputs, found.places, strict=True)
    return [each for each, place in pairs if isinstance(each, torch.Tensor) and place is None]


def split_candidate(given: str) -> tuple[str, str]:
    """A path and a function's name, "" for the task's."""
    path, colon, function = given.rpartition(":")
    return (path, function) if colon and os.path.exists(path) else (given, "")
