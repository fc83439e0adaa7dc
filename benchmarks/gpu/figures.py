"""What the steps share: the device, how figures are told, and how programs and tools are run and timed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from goals import FIGURES

import replayfmt

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
WORK = Path(os.environ.get("GPU_CHECK_WORK", "build/gpu/work"))
NEEDS_GPU = "it needs a GPU"
_reasons: dict[str, str] = {}  # by figure: why it was not measured; "" if it was
_STEP_S = float(os.environ.get("GPU_CHECK_ENDS", time.time() + 1e6)) - time.time()


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def tell(what: str, measured: float | None, **details: Any) -> None:
    """Print a figure, one of goals.py, as a line of JSON. `measured` is None where `details` has a `reason`."""
    figure = FIGURES[what]
    _reasons[what] = "" if measured is not None else details["reason"]
    print(json.dumps(figure.row(None if measured is None else float(measured), details), default=str), flush=True)


class _NotMeasured(BaseException):
    """Its text is the reason. Not an Exception, which measuring takes for that of an op."""


def require(found: object, figure: str) -> None:
    """Ends a part that needs what the part of this figure found, if that found nothing."""
    if not found:
        raise _NotMeasured(f"it needs what was to be measured for `{figure}`: {_reasons[figure]}")


@contextlib.contextmanager
def telling(*names: str, share: float = 0.7) -> Iterator[None]:
    """A part of a step, which tells these figures. If it fails, or takes more than this share of the step's time, those
    that are left are not measured, and the step goes on."""
    began, reason = time.perf_counter(), "the part ended without it"
    try:
        with _at_most(share):
            yield
    except KeyboardInterrupt:  # the step's time is up
        raise
    except _NotMeasured as why:
        traceback.print_exc()
        reason = str(why)
    except BaseException as error:  # a tool leaves with SystemExit
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).strip().partition("\n")[0][:300]
        if findings := getattr(error, "findings", ()):
            print(*findings, sep="\n", file=sys.stderr, flush=True)
            said = findings[0][:400] + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "")
        reason = f"{type(error).__name__}: {said} ({Path(last.filename).name}:{last.lineno})"
    print(f"# {names[0]}: {time.perf_counter() - began:.1f} s", flush=True)
    for name in names:
        if name not in _reasons:
            tell(name, None, reason=reason)


@contextlib.contextmanager
def _at_most(share: float) -> Iterator[None]:
    """Ends a part that takes more than this share of the step's time; parts of a part are not timed."""
    seconds = share * _STEP_S
    if share >= 1 or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def too_long(*_: object) -> None:
        raise _NotMeasured(f"it took more than {seconds:.0f} s, its share of the step's time")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def needs_gpu(*names: str) -> bool:
    """Whether there is none; then these figures are told to be not measured."""
    for name in () if ON_GPU else names:
        tell(name, None, reason=NEEDS_GPU)
    return not ON_GPU


class Timer:
    """Wall time and device time of a replay's ops or of a program, in milliseconds; on the host both are the same.

    It may be given to `Plan.execute`, which starts it when state is restored.
    """

    def __init__(self) -> None:
        self.wall_ms = self.device_ms = 0.0
        self._running = False

    def start(self) -> None:
        wait()
        self._running = True
        if ON_GPU:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._began = time.perf_counter()

    def stop(self) -> None:
        if not self._running:
            return
        self._running = False
        if ON_GPU:
            self._events[1].record()
        wait()
        taken = (time.perf_counter() - self._began) * 1e3
        self.wall_ms += taken
        self.device_ms += self._events[0].elapsed_time(self._events[1]) if ON_GPU else taken

    resume, pause = start, stop


def timed(work: Callable[[], object]) -> Timer:
    timer = Timer()
    timer.start()
    work()
    timer.stop()
    return timer


def in_turns(rounds: int, **ways: Callable[[], float]) -> dict[str, list[float]]:
    """What the ways return, in turns, after one turn that does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            value = way()
            if number:
                found[name].append(value)
    return found


def median_of(function: Callable[..., float], *series: list[float]) -> float:
    """The median over the turns of a figure that is made of one turn's times."""
    return statistics.median(function(*values) for values in zip(*series, strict=True))


def captured(path: Path, program: Callable[[], object], **options: Any) -> Any:
    """What a program returns, under a capture; its results live as long as the caller keeps them."""
    with replayfmt.capture(path, force=True, **options):
        return program()


def verified(path: Path, verify: str = "auto", said: str = "", **options: Any) -> dict[str, Any]:
    """What a verified replay finds, as figures of a row: `ok` is 1 if nothing differs, and a note says what was to be
    said."""
    with replayfmt.Plan(path, **options) as plan:
        result = plan.execute(verify=verify)  # type: ignore[arg-type]
        return {
            "ok": float(
                result.outcome == "ok"
                and result.verification.mode != "none"
                and any(said in note for note in ("", *result.notes))
            ),
            "outcome": result.outcome,
            "verified": result.verified[:300],
            "nondeterministic": list(result.nondeterministic[:20]),
            "nondeterministic_count": len(result.nondeterministic),
            "divergence": None if result.divergence is None else str(result.divergence)[:300],
            "notes": [note[:200] for note in result.notes[:6]],
        }


def replays(what: str, path: Path, verify: str = "auto", said: str = "", **options: Any) -> None:
    """Tell whether a capture replays without a difference, in the way that a note says."""
    found = verified(path, verify, said, **options)
    tell(what, found.pop("ok"), **found)


def tool(name: str, *arguments: object, codes: tuple[int, ...] = (0,)) -> str:
    """What a command line tool prints, run in this process. Raises RuntimeError for another exit code than expected,
    and KeyboardInterrupt if the tool was interrupted: the step's time is up."""
    from opreplay_tools.command import INTERRUPTED

    out, before, code = io.TextIOWrapper(io.BytesIO(), "utf-8"), sys.argv, 0
    problems = io.StringIO()
    sys.argv = [f"opreplay-{name}", *map(str, arguments)]
    print("$", *sys.argv, flush=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(problems):
            importlib.import_module(f"opreplay_tools.{name}").main()
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.argv = before
        out.flush()
        said = out.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
        print(said[-3000:], problems.getvalue()[-3000:], flush=True)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code not in codes:
        last = (problems.getvalue() or said).strip().rpartition("\n")[2]
        raise RuntimeError(f"opreplay-{name}: exit code {code}: {last[:300]}")
    return said


def benchmark(path: Path, *flags: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """The JSON of opreplay-benchmark."""
    out = WORK / "benchmark.json"
    tool("benchmark", "--force", f"--benchmark-out={out}", *flags, path, codes=codes)
    return json.loads(out.read_text())  # type: ignore[no-any-return]
