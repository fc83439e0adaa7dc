"""A fuzzer that changes what a capture says and then makes every checksum valid again.

    PYTHONPATH=tests python -m safety.fuzzing [--stage=read|plan|run|tools] [--cases=N] [--seed=S]

Each case is made of its number alone, so that `--seed=S --cases=1` is that case again. The work is done in a process of
its own: one that dies, takes too long or gives anything but a result or one error of ours is a failure, and the next
process goes on behind it. Without --cases it runs until it is stopped. Exit code 1 if a case failed.

    read    open, decode every record, dump, check
    plan    what `read` does not refuse is planned
    run     and replayed
    tools   shown, reported, exported, trimmed and compared, in one of the ways of the command line
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
from format.reseal import Frame, join, split, tables_of

from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks
from replayfmt.errors import OpReplayError
from replayfmt.format import flatbuffer_tables
from replayfmt.format.codes import FrameKind
from replayfmt.format.contents import decode_session, encode_session
from replayfmt.format.definition_tables import TABLES, encode_tables
from replayfmt.format.flatbuffer_tables import RECORDS, SCALARS
from replayfmt.format.frames import FLAG_CONSOLIDATED
from replayfmt.format.maintenance import check_capture
from replayfmt.format.reader import open_capture

from .code_captures import write as write_code
from .programs import PROGRAMS, together

_TESTS = Path(__file__).resolve().parents[1]
STAGES = ("read", "plan", "run", "tools")
# Of the stage `tools`. CASE is the case's file, OTHER one that was not changed, OUT a name that is free.
COMMANDS = (
    "dump CASE",
    "dump --findings CASE",
    "dump --summary --format=jsonl CASE",
    "dump --signatures CASE",
    "dump --kernel-skeleton=1 CASE",
    "report --output=OUT CASE",
    "check --recover=OUT CASE",
    "export --format=replay-zip --partial CASE OUT",
    "export --format=kernel-task --ops=1:4 CASE OUT",
    "export --format=perfetto CASE OUT",
    "export --format=csv CASE OUT",
    "trim --payload=none CASE OUT",
    "trim --ops=1:4 CASE OUT",
    "trim --redact --no-sources CASE OUT",
    "trim --script=OUT CASE",
    "compare CASE OTHER",
)
POLICIES = ("full", "integers", "none")
# How long a case may work, and how long it may take where it waits for something, or the machine is busy.
_LONGEST_CASE_CPU_S, _LONGEST_CASE_S = 60, 1800
_MEMORY_BYTES = 6 << 30  # what a process may have: a case that asks for more than that is told so by PyTorch
_TEXTS = (
    b"",
    b"\xff\xfe",
    b"x" * 70_000,
    b"aten::exp",
    b"self",
    b"__class__",
    b"default",
    b"{}",
    b"\x1b[2J\xe2\x80\xae",
    b"aten::exp(Tensor self) -> Tensor",
    b"out",
    b"Tensor",
    b"aten::from_file",
    b"int[1000000000]",
)
_LIMITS = {
    dtype: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in SCALARS.values() if dtype.kind != "f"
}


@dataclass(frozen=True)
class Source:
    """A capture to change: its preamble and frames, and where the numbers of each frame lie in its body."""

    preamble: bytes
    frames: list[Frame]
    places: list[dict[str, Place]]


@dataclass(frozen=True)
class Place:
    """A column of a FlatBuffer: its type, its first byte and how many elements it has."""

    dtype: np.dtype
    first: int
    count: int


def make_sources(folder: Path) -> list[Source]:
    """Captures to change. Each is of one small program, with definitions that stand there once and no totals, so that
    what is changed does not contradict them; the last but one is of all programs, and as it was written, the last has
    kernels with attachments."""
    import torch
    from failure.table import recorded

    torch.set_num_threads(1)
    everything = together(*PROGRAMS)
    sources = []
    for number, program in enumerate((*PROGRAMS, everything)):
        for payload in POLICIES if program is not everything else POLICIES[:1]:
            torch.manual_seed(0)
            path = recorded(
                folder,
                lambda program=program: program(folder),
                f"{number}-{payload}",
                payload=payload,
                digests="ops" if payload == "full" else "none",
            )
            preamble, frames = split(path.read_bytes())
            if program is not everything:
                frames = [_short_head(frames[0]), *(frame for frame in frames[1:] if not _repeats(frame))]
            sources.append(Source(preamble, frames, [_places(frame) for frame in frames]))
    preamble, frames = split(write_code(folder / "code.opreplay", kernels=2, called=False).read_bytes())
    frames = [frame for frame in frames if not _repeats(frame)]
    return [*sources, Source(preamble, frames, [_places(frame) for frame in frames])]


def _repeats(frame: Frame) -> bool:
    return frame.header.kind == FrameKind.summary or bool(frame.header.flags & FLAG_CONSOLIDATED)


def _short_head(frame: Frame) -> Frame:
    session = decode_session(frame.body, "source")
    kept = {name: session.settings[name] for name in ("grad_enabled", "num_threads", "float32_matmul_precision")}
    return replace(frame, body=bytes(encode_session(replace(session, settings=kept, libraries={}))))


def _places(frame: Frame) -> dict[str, Place]:
    if frame.header.kind not in (FrameKind.records, FrameKind.tables):
        return {}
    layout = RECORDS if frame.header.kind == FrameKind.records else TABLES
    table = flatbuffer_tables.root(frame.body, layout, "source")
    begin = np.frombuffer(frame.body, np.uint8).ctypes.data
    columns = {
        name: table.column(name)
        for name, field in layout.fields.items()
        if field.type.startswith("[") and field.type != "[string]"
    }
    return {
        name: Place(column.dtype, column.ctypes.data - begin, len(column))
        for name, column in columns.items()
        if column is not None and len(column)
    }


def _change_number(body: bytearray, place: Place, chance: random.Random) -> None:
    """Give one element of a column another value: near, another element's, or extreme."""
    values = np.frombuffer(body, place.dtype, place.count, place.first)
    at = chance.randrange(place.count)
    if place.dtype.kind == "f":
        values[at] = chance.choice([0, -1, 1e300, float("nan"), float("inf"), 3])
        return
    lowest, highest = _LIMITS[place.dtype]
    value = chance.choice(
        [
            int(values[at]) + chance.choice([-1, 1, 2]),
            int(values[chance.randrange(place.count)]),
            chance.choice([0, highest, lowest, 1, 7, 2**31, 2**40]),
        ]
    )
    values[at] = max(lowest, min(highest, value))


def _change_texts(frame: Frame, chance: random.Random) -> Frame:
    """Give one string another text, or say that a family's ids begin elsewhere."""
    strings, tables, firsts = tables_of(frame.body)
    if strings and chance.random() < 0.9:
        strings[chance.randrange(len(strings))] = chance.choice([*_TEXTS, chance.choice(strings)])
    else:
        firsts[chance.choice(list(firsts))] += chance.choice([-1, 1])
    return replace(frame, body=bytes(encode_tables(strings, tables, firsts)))


def _change_bytes(frame: Frame, chance: random.Random) -> Frame:
    """Put any bytes into a body, or cut it off."""
    if frame.header.kind == FrameKind.payload and chance.random() < 0.5:
        return replace(frame, payload_data=bytes(reversed(frame.payload_data)))
    body = bytearray(frame.body)
    for _ in range(chance.randint(1, 4)):
        if body:
            body[chance.randrange(len(body))] = chance.choice([0, 1, 255, chance.randrange(256)])
    if chance.random() < 0.2:
        del body[chance.randrange(len(body) + 1) :]
    return replace(frame, body=bytes(body))


def _changed_frame(frame: Frame, places: dict[str, Place], chance: random.Random) -> Frame:
    kind = chance.random()
    if not places or kind < 0.1:
        return _change_bytes(frame, chance)
    if frame.header.kind == FrameKind.tables and kind < 0.25:
        return _change_texts(frame, chance)
    body = bytearray(frame.body)
    for _ in range(chance.randint(1, 3)):
        _change_number(body, chance.choice(list(places.values())), chance)
    return replace(frame, body=bytes(body))


def make_case(sources: list[Source], seed: int) -> bytes:
    """The file of a case, its checksums valid."""
    chance = random.Random(seed)
    source = chance.choice(sources)
    frames = list(source.frames)
    rich = [number for number, places in enumerate(source.places) if places]
    for _ in range(chance.choice([1, 1, 1, 2])):
        place = chance.choice(rich) if chance.random() < 0.95 else chance.randrange(len(frames))
        # What was changed already is changed as bytes: its columns may lie elsewhere.
        places = source.places[place] if frames[place] is source.frames[place] else {}
        frames[place] = _changed_frame(frames[place], places, chance)
    if chance.random() < 0.03:  # frames that are missing, twice there, or elsewhere
        place, other = chance.randrange(len(frames)), chance.randrange(len(frames))
        match chance.randrange(3):
            case 0 if place:
                del frames[place]
            case 1:
                frames.insert(other, frames[place])
            case _:
                frames[place], frames[other] = frames[other], frames[place]
    return join(source.preamble, frames)


def try_case(sources: list[Source], seed: int, stage: str, path: Path) -> str:
    """What a case comes to: `ok`, or the name of an error of ours. Raises anything else."""
    try:
        data = make_case(sources, seed)
    except (OpReplayError, ValueError, OverflowError):
        return "not made"  # the helpers that build files refuse it themselves
    path.write_bytes(data)
    try:
        if stage == "read":
            with open_capture(path) as reader:
                for record in reader.records():
                    record.args  # noqa: B018 - decoded when it is made
                for chunk in jsonl_chunks(reader, Selection()):
                    chunk.encode()
            check_capture(path)
            return "ok"
        if stage == "tools":
            return _call_tool(sources, random.Random(seed), path)
        from replayfmt.replay.plan import Plan

        for keep_going in (False, True):
            with Plan(path, keep_going=keep_going) as plan:
                if stage == "run":
                    outcome = plan.execute(verify="auto", keep_going=keep_going).outcome
                else:
                    outcome = "ok"
        return outcome
    except OpReplayError as error:
        if len(str(error)) > 5000:
            raise AssertionError(f"an error of {len(str(error))} characters") from error
        return type(error).__name__


def _call_tool(sources: list[Source], chance: random.Random, path: Path) -> str:
    """One of the commands on the case's file, in a folder of its own: `ok`, or the name of an error of ours."""
    source, command = chance.choice(sources), chance.choice(COMMANDS)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        other = Path(name, "other.opreplay")
        other.write_bytes(join(source.preamble, source.frames))
        for word, place in {"CASE": path, "OTHER": other, "OUT": Path(name, "out")}.items():
            command = command.replace(word, str(place))
        tool, *given = command.split()
        try:
            code = import_module(f"opreplay_tools.{tool}").cli.main(given, prog_name=tool, standalone_mode=False)
        except click.ClickException as error:
            return type(error).__name__
        finally:
            left = [each.name for each in Path(name).rglob("*.partial")]
        if left:
            raise AssertionError(f"opreplay-{tool} left {left}")
    return "ok" if not code else f"exit code {code}"


# ------------------------------------------------------------------------------------------------------------ processes


def _work(stage: str, first: int, end: int, folder: Path) -> None:
    """Cases one after the other; notes the number of the one that runs, and what failed or was slow."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stderr = open(folder / "stderr", "w")  # noqa: SIM115 - warnings of operators, for as long as the process
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work:
        sources = make_sources(Path(work))
        if stage in ("run", "tools"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        path, ended = Path(work) / "case.opreplay", Counter[str]()
        progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
        for seed in range(first, end):
            os.pwrite(progress, f"{seed:20d}".encode(), 0)
            signal.setitimer(signal.ITIMER_PROF, _LONGEST_CASE_CPU_S)
            signal.alarm(_LONGEST_CASE_S)
            try:
                ended[try_case(sources, seed, stage, path)] += 1
            except Exception as error:  # anything but an error of ours is what is looked for
                with open(folder / "failures", "a", encoding="utf-8") as file:
                    file.write(json.dumps([seed, f"{type(error).__name__}: {error}"[:300]]) + "\n")
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        (folder / "ended").write_text(json.dumps(ended))


def fuzz(
    stage: str, first: int, cases: int | None, *, batch: int = 20_000, loud: bool = False
) -> tuple[int, list[Any]]:
    """How many cases were tried, and the failures as [case, what]."""
    tried, failures, end = 0, [], None if cases is None else first + cases
    at, total, began = first, Counter[str](), time.monotonic()
    while end is None or at < end:
        stop = at + batch if end is None else min(at + batch, end)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            code = subprocess.call(
                [
                    sys.executable,
                    "-m",
                    "safety.fuzzing",
                    "--worker",
                    name,
                    f"--stage={stage}",
                    f"--seed={at}",
                    f"--cases={stop - at}",
                ],
                env={**os.environ, "PYTHONPATH": str(_TESTS)},
            )
            if (folder / "failures").exists():
                failures += [json.loads(line) for line in (folder / "failures").read_text().splitlines()]
            if code:
                if not (folder / "progress").exists():
                    raise RuntimeError(f"the fuzzer itself failed: {(folder / 'stderr').read_text()[-2000:]}")
                died = int((folder / "progress").read_text())
                failures.append([died, f"the process ended with {code}"])
                stop = died + 1
            else:
                total.update(json.loads((folder / "ended").read_text()))
        tried += stop - at
        at = stop
        if loud:
            rate = tried / (time.monotonic() - began)
            print(
                f"{stage}: {tried} cases, {len(failures)} failed, {rate:.0f} a second; go on with --seed={at}  "
                f"{dict(total)}",
                flush=True,
            )
            for case, what in failures[-5:]:
                print(f"  case {case}: {what}", flush=True)
    return tried, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", choices=STAGES, default="read")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _work(given.stage, given.seed, given.seed + given.cases, Path(given.worker))
        return 0
    _tried, failures = fuzz(given.stage, given.seed, given.cases, loud=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
