"""Checks kernels against the task in this folder. Needs only PyTorch.

    python check.py                       # does the reference give the expected outputs here?
    python check.py mine.py other.py:f    # is a kernel right, and how fast is it?
    python check.py --variants --guard --json=result.json mine.py

A kernel is a function of a Python file, by default the one that the task names, or of a C++ or CUDA source, which is
built. It gets the arguments that the captured program gave the original, and has to return and write what that did.
Each kernel is judged in a process of its own. Exit code 0 if every kernel is accepted, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import mmap
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .task_calls import Task, described
from .task_cases import Case, Options, load_task
from .task_judging import REASONS, CaseJudge, Fault, Judge, split_candidate

REFERENCE = "reference"  # in place of a candidate: the reference is timed


def judge_here(task: Task, given: str, tell: Callable[..., None], lock: Any) -> None:
    """Judge a candidate in this process, and measure it if it is right."""
    if given == REFERENCE:
        _measure_all(task, None, tell, lock)
        return
    judge = Judge(task, tell)
    try:
        function = judge.load(given)
    except Fault as fault:
        tell(event="fault", case="", reason=fault.reason, text=fault.text)
        return
    right, settled = True, judge.settled
    fcntl.flock(lock, fcntl.LOCK_SH)
    for case in task.cases(task.make):
        variants = task.variants(case)
        if variants is None:
            continue
        try:
            CaseJudge(judge, function, case, variants).judge()
            tell(event="right", case=case.name)
        except Fault as fault:
            right = False
            tell(**fault.event(case.name))
            if fault.reason in ("global state", "reads the task", "out of memory"):
                break
    fcntl.flock(lock, fcntl.LOCK_UN)
    if right:
        _measure_all(task, judge, tell, lock, function)
    try:
        settled("in the timed calls")
    except Fault as fault:
        tell(**fault.event(""))


def _measure_all(task: Task, judge: Judge | None, tell: Callable[..., None], lock: Any, function: Any = None) -> None:
    """Time every workload; without a judge the reference against itself."""
    if task.options.min_time_s <= 0:
        return
    module = task.reference()
    judge = judge or Judge(task, tell)
    fcntl.flock(lock, fcntl.LOCK_EX)  # nothing else runs meanwhile
    for workload in task.workloads:
        reference = module.PROGRAMS[workload["program"]]
        case = Case(task.folder, task.task, workload, 0, task.make)
        tell(event="call", case=case.name, call="the timed calls")
        try:
            variants = None if function is None else task.variants(case)
            found = CaseJudge(judge, function or reference, case, variants).measure(reference)
            tell(event="timed", case=case.name, workload=workload["name"], **found)
        except Fault as fault:
            tell(**fault.event(case.name))
        except Exception as error:
            tell(event="fault", case=case.name, reason="raises", text=f"in a timed call: {described(error)}")


def in_child(work: Callable[[Callable[..., None]], None], given: str, output: Path, options: Options) -> Running:
    """Start work for a candidate in a forked process that reports events through a pipe, each with a word that only
    the two know: what a candidate says for itself does not count, and nothing is taken back."""
    sys.stdout.flush()
    word = os.urandom(16).hex().encode()
    events, end = os.pipe()
    child = os.fork()
    if child:
        os.close(end)
        os.set_blocking(events, False)
        return Running(given, child, events, word, output)
    code = 1
    try:
        os.setsid()
        os.close(events)
        said = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        encode, write = json.dumps, os.write

        def tell(**event: Any) -> None:
            write(end, word + encode(event).encode() + b"\n")

        torch.set_grad_enabled(False)
        _limit_memory(options.memory_bytes)
        work(tell)
        tell(event="end")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _limit_memory(room: int) -> None:
    """Of what can be written, not of addresses: a driver reserves more of these than there is memory."""
    status = Path("/proc/self/statm")
    if room and status.exists():
        used = int(status.read_text().split()[5]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))


@dataclass
class Running:
    """A candidate's process."""

    given: str
    process: int
    pipe: int
    word: bytes
    output: Path
    until: float = math.inf
    status: int | None = None
    timed_out: bool = False
    told: bytes = b""

    def poll(self) -> bool:
        """Whether it has ended; ends it when its time is up, and what it has started when it has ended."""
        self._read()
        done, status = os.waitpid(self.process, os.WNOHANG)
        if not done and time.monotonic() <= self.until:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        if not done:
            self.timed_out = True
            _done, status = os.waitpid(self.process, 0)
        self.status = status
        self._read()
        os.close(self.pipe)
        return True

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self.pipe, 1 << 16):
                self.told += part

    def events(self) -> list[dict[str, Any]]:
        """What the judge in it said."""
        lines = (line.removeprefix(self.word) for line in self.told.splitlines() if line.startswith(self.word))
        return [json.loads(line) for line in lines if line.endswith(b"}")]

    def last_line(self) -> str:
        there = self.output.exists()
        return (self.output.read_text(errors="replace").strip().splitlines() or [""])[-1] if there else ""


def judge_all(folder: Path, candidates: list[str], options: Options) -> dict[str, Any]:
    """Judge candidates, each in a process of its own. Raises ValueError and OSError for a task that cannot be read."""
    task = Task(folder, options)
    with tempfile.TemporaryDirectory(prefix="opreplay-judge-") as scratch:
        task.scratch = Path(os.path.realpath(scratch))
        task.make = task.reference().MAKE
        first = in_child(task.prepare, "", task.scratch / "reference", options)
        while not first.poll():
            time.sleep(0.005)
        events = first.events()
        if not any(each["event"] == "end" for each in events):
            raise ValueError(f"{folder}: the reference cannot be run: {first.last_line() or how_it_died(first)}")
        task.take(events)
        reference = {each["case"]: each["wrong"] for each in events if each["event"] == "reference"}
        return {
            "task": task.task["name"],
            "reference": {"ok": not any(reference.values()), "cases": reference},
            "candidates": _judge_in_turn(task, candidates, options),
        }


def _judge_in_turn(task: Task, candidates: list[str], options: Options) -> list[dict[str, Any]]:
    waiting = list(enumerate(candidates))
    running: dict[int, Running] = {}
    found: dict[int, dict[str, Any]] = {}
    lock_path = task.scratch / "lock"
    lock_path.touch()

    def start(number: int, given: str, options: Options, name: str = "") -> Running:
        built = given != REFERENCE and not split_candidate(given)[0].endswith(".py")
        allowed = options.timeout_s * (3 if built else 1)

        def work(tell: Callable[..., None]) -> None:
            task.options = options
            with lock_path.open() as lock:
                judge_here(task, given, tell, lock)

        each = in_child(work, given, task.scratch / f"candidate-{number}{name}", options)
        each.until = time.monotonic() + allowed
        return each

    while waiting or running:
        while waiting and len(running) < max(options.jobs, 1):
            number, given = waiting.pop(0)
            running[number] = start(number, given, options)
        for number, each in list(running.items()):
            if each.poll():
                del running[number]
                found[number] = verdict_of(task, each)
                if options.guard and found[number]["verdict"] == "crashed":
                    found[number]["text"] += _behind_page(task, number, each, start, options)
        time.sleep(0.005)
    return [found[number] for number in range(len(candidates))]


def _behind_page(task: Task, number: int, dead: Running, start: Any, options: Options) -> str:
    """The argument and side whose page a kernel touched: only that page is unreadable, and the kernel dies again."""
    events = [each for each in dead.events() if each["event"] == "call"]
    if not events or "unreadable" not in events[-1]["call"]:
        return ""
    name = events[-1]["case"].rpartition(".")[0]
    workload = next(each for each in task.workloads if each["name"] == name)
    for side in ("after", "before"):
        for place, storage in enumerate(workload["storages"]):
            if f"({side})" not in events[-1]["call"]:
                continue
            changed = replace(options, pages=f"{place}:{side}", only=name)
            again = start(number, dead.given, changed, f"-{place}-{side}")
            while not again.poll():
                time.sleep(0.005)
            if os.WIFSIGNALED(again.status) and not again.timed_out:
                return f"; it touched memory {side} argument {', '.join(storage['arguments'])}"
    return ""


def how_it_died(each: Running) -> str:
    assert each.status is not None
    if os.WIFSIGNALED(each.status):
        return f"killed by {signal.Signals(os.WTERMSIG(each.status)).name}"
    return f"exited with {os.WEXITSTATUS(each.status)} before it was judged"


def verdict_of(task: Task, each: Running) -> dict[str, Any]:
    """What was found on one candidate."""
    events = each.events()
    faults = [event for event in events if event["event"] == "fault"]
    calls = [event for event in events if event["event"] == "call"]
    where = f" in {calls[-1]['call']} of {calls[-1]['case']}" if calls else ""
    if not any(event["event"] == "end" for event in events):
        reason = "out of time" if each.timed_out else "crashed"
        text = f"{how_it_died(each)}{where}" if reason == "crashed" else f"it was stopped{where}"
        last = each.last_line()
        if "MemoryError" in last or "bad_alloc" in last:
            reason = "out of memory"
        faults.append({"event": "fault", "case": calls[-1]["case"] if calls else "", "reason": reason, "text": text})
    elif each.given != REFERENCE and not faults:
        right = {event["case"] for event in events if event["event"] == "right"}
        timed = {event["workload"] for event in events if event["event"] == "timed"}
        names = {each["name"] for each in task.workloads} if task.options.min_time_s > 0 else set()
        if right != set(task.taken) or timed != names:
            text = f"it left after {len(right)} of {len(task.taken)} cases, as if it had been judged"
            faults.append({"event": "fault", "case": "", "reason": "crashed", "text": text})
    allowed = [fault for fault in faults if fault["reason"] in task.options.allow]
    faults = [fault for fault in faults if fault["reason"] not in task.options.allow]
    order = list(REASONS)
    first = min(faults, key=lambda fault: order.index(fault["reason"])) if faults else None
    return {
        "candidate": each.given,
        "verdict": "accepted" if first is None else first["reason"],
        "text": "" if first is None else first["text"],
        "case": None if first is None else first["case"],
        "worst": None if first is None else first.get("worst"),
        "faults": faults,
        "allowed": allowed,
        "right": sum(event["event"] == "right" for event in events),
        "timed": [event for event in events if event["event"] == "timed"],
    }


def whole_workload(task: dict[str, Any], timed: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Nanoseconds of all calls of the workloads, with the candidate and with the reference."""
    calls = {each["name"]: each["calls"] for each in task["workloads"]}
    if not timed:
        return None
    sums = [
        sum(calls[each["workload"]] * statistics.median(each["times_ns"][side]) for each in timed)
        for side in ("candidate", "reference")
    ]
    return sums[0], sums[1]


def lines(task: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """The result as text."""
    wrong = {case: text for case, text in found["reference"]["cases"].items() if text}
    yield f"reference: {'as expected' if not wrong else 'NOT as expected'} in {len(found['reference']['cases'])} cases"
    yield from (f"  {case}: {text}" for case, text in wrong.items())
    for each in found["candidates"]:
        if each["verdict"] == "accepted":
            whole = whole_workload(task, each["timed"])
            speed = "" if whole is None else f", {whole[0] / whole[1]:.3f} of the reference's time over all calls"
            yield f"{each['candidate']}: accepted{speed}"
        else:
            where = f" ({each['case']})" if each["case"] else ""
            yield f"{each['candidate']}: REJECTED: {each['verdict']}{where}: {each['text']}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("candidates", nargs="*", metavar="KERNEL.py[:FUNCTION]")
    parser.add_argument("--task", default=os.path.dirname(os.path.abspath(__file__)), help="the task's folder")
    parser.add_argument(
        "--workload", dest="only", default="", metavar="TEXT", help="only workloads whose name contains this"
    )
    parser.add_argument("--variants", action="store_true", help="also with zeros, NaN, Inf, empty and odd sizes")
    parser.add_argument("--guard", action="store_true", help="also between unreadable pages")
    parser.add_argument("--allow", action="append", default=[], choices=list(REASONS), metavar="REASON")
    number: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    parser.add_argument("--min-time", dest="min_time_s", default=0.05, help="time each workload; 0: do not", **number)
    parser.add_argument("--timeout", dest="timeout_s", default=120.0, help="for each kernel", **number)
    number = {"type": int, "metavar": "BYTES"}
    parser.add_argument("--cold-bytes", default=0, help="rewrite so many bytes before each timed call", **number)
    parser.add_argument(
        "--memory-limit", dest="memory_bytes", default=8 << 30, help="of each kernel; 0: none", **number
    )
    parser.add_argument("--jobs", type=int, default=2, help="kernels that are judged at the same time")
    parser.add_argument("--json", metavar="FILE", help="write the result to FILE")
    given = parser.parse_args(arguments)
    options = Options(**{name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__})
    for each in given.candidates:
        if each != REFERENCE and not os.path.exists(split_candidate(each)[0]):
            parser.error(f"{each}: there is no such file")
    try:
        found = judge_all(Path(given.task), given.candidates, options)
        task = load_task(Path(given.task))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for line in lines(task, found):
        print(line)
    rejected = any(each["verdict"] != "accepted" for each in found["candidates"])
    return int(rejected or not found["reference"]["ok"])


if __name__ == "__main__":
    sys.exit(main())
