"""A fuzzer that changes what a capture says and then makes every checksum valid again.

    PYTHONPATH=tests python -m safety.fuzzing [--stage=read|plan|run] [--cases=N] [--seed=S]

Each case is made of its number alone, so that `--seed=S --cases=1` is that case again. The work is done in a process of
its own: one that dies, takes too long or gives anything but a result or one error of ours is a failure, and the next
process goes on behind it. Without --cases it runs until it is stopped. Exit code 1 if a case failed.

    read    open, decode every record, dump, check
    plan    what `read` does not refuse is planned
    run     and replayed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from format.reseal import (
    Frame,
    join,
    records_body,
    records_columns,
    split,
    tables_of,
)

from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import jsonl_chunks
from replayfmt.errors import OpReplayError
from replayfmt.format.codes import FrameKind
from replayfmt.format.definitions.tables_output import encode_tables
from replayfmt.format.maintenance.check import check_capture
from replayfmt.format.reader import open_capture

_TESTS = Path(__file__).resolve().parents[1]
STAGES = ("read", "plan", "run")
_LONGEST_CASE_S = 120
_TEXTS = (b"", b"\xff\xfe", b"x" * 70_000, b"aten::exp", b"self", b"__class__", b"default", b"{}",
          b"\x1b[2J\xe2\x80\xae", b"aten::exp(Tensor self) -> Tensor", b"out",
          b"Tensor", b"aten::from_file", b"int[1000000000]")

Source = tuple[bytes, list[Frame]]


def make_sources(folder: Path) -> list[Source]:
    """Captures to change: views, in-place ops, random numbers, lists, sparse and quantized tensors, resizes."""
    import torch

    import replayfmt

    torch.set_num_threads(1)
    sources = []
    for number, payload in enumerate(("full", "integers", "none")):
        torch.manual_seed(0)
        weight, index = torch.arange(16.0), torch.tensor([1, 2])
        path = folder / f"source{number}.opreplay"
        with replayfmt.capture(path, payload=payload, digests="ops" if payload == "full" else "none"), \
                replayfmt.scope("execute"):
            doubled = weight * 2
            part = doubled.view(4, 4).t()[1:]
            filled = torch.empty(4)
            filled.copy_(part[0])
            filled.untyped_storage().resize_(64)
            drawn = torch.rand(3)
            joined = torch.cat([doubled, filled])
            joined.add_(1)
            if payload == "full":
                joined.sum().item()
                doubled.numpy()[0] = 5
            torch._foreach_mul_([doubled, filled], 2.0)
            picked = weight[index]
            normed = torch.native_layer_norm(part, [4], None, None, 1e-5)
            strided = torch.zeros(8).as_strided((2, 2), (2, 1), 1)
            sparse = torch.ones(2, 2).to_sparse() * 2
            quantized = torch.quantize_per_tensor(weight, 0.5, 3, torch.qint8).dequantize()
            del drawn, picked, normed, strided, sparse, quantized
        sources.append(split(path.read_bytes()))
    return sources


def mutate(columns: dict[str, Any], chance: random.Random) -> None:
    """Change one to three elements of a frame's columns."""
    names = [name for name, values in columns.items() if isinstance(values, np.ndarray) and len(values)]
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(names)
        values = columns[name] = columns[name].copy()
        at = chance.randrange(len(values))
        if values.dtype.kind == "f":
            values[at] = chance.choice([0, -1, 1e300, float("nan"), float("inf"), 3])
            continue
        limits = np.iinfo(values.dtype)
        extreme = chance.choice([0, int(limits.max), int(limits.min), 1, 7, 2**31, 2**40])
        near, other = int(values[at]) + chance.choice([-1, 1, 2]), int(values[chance.randrange(len(values))])
        changed = chance.choice([near, other, extreme])
        values[at] = max(int(limits.min), min(int(limits.max), changed))


def _changed_frame(frame: Frame, chance: random.Random) -> Frame:
    if chance.random() < 0.1:       # any bytes at all
        body = bytearray(frame.body)
        for _ in range(chance.randint(1, 4)):
            if body:
                body[chance.randrange(len(body))] = chance.choice([0, 1, 255, chance.randrange(256)])
        if chance.random() < 0.2:
            del body[chance.randrange(len(body) + 1):]
        return replace(frame, body=bytes(body))
    if frame.header.kind == FrameKind.records:
        columns = records_columns(frame.body)
        mutate(columns, chance)
        return replace(frame, body=records_body(columns))
    strings, tables, firsts = tables_of(frame.body)
    if strings and chance.random() < 0.3:
        strings[chance.randrange(len(strings))] = chance.choice([*_TEXTS, chance.choice(strings)])
    mutate(tables, chance)
    if chance.random() < 0.05:
        firsts[chance.choice(list(firsts))] += chance.choice([-1, 1])
    return replace(frame, body=bytes(encode_tables(strings, tables, firsts)))


def make_case(sources: list[Source], seed: int) -> bytes:
    """The file of a case, its checksums valid."""
    chance = random.Random(seed)
    preamble, frames = chance.choice(sources)
    frames = list(frames)
    rich = [place for place, frame in enumerate(frames) if frame.header.kind in (FrameKind.records, FrameKind.tables)]
    last_tables = max(place for place in rich if frames[place].header.kind == FrameKind.tables)
    for _ in range(chance.choice([1, 1, 1, 2])):
        place = chance.choice([*(each for each in rich if frames[each].header.kind == FrameKind.records), last_tables])
        if chance.random() < 0.05:
            place = chance.randrange(len(frames))
        frame = frames[place]
        if frame.header.kind in (FrameKind.records, FrameKind.tables):
            frames[place] = _changed_frame(frame, chance)
        elif frame.header.kind != FrameKind.payload or chance.random() < 0.5:
            body = bytearray(frame.body)
            if body:
                body[chance.randrange(len(body))] = chance.randrange(256)
            frames[place] = replace(frame, body=bytes(body))
        else:
            frames[place] = replace(frame, payload_data=bytes(reversed(frame.payload_data)))
    if chance.random() < 0.03:      # frames that are missing, twice there, or elsewhere
        place, other = chance.randrange(len(frames)), chance.randrange(len(frames))
        match chance.randrange(3):
            case 0 if place:
                del frames[place]
            case 1:
                frames.insert(other, frames[place])
            case _:
                frames[place], frames[other] = frames[other], frames[place]
    return join(preamble, frames)


def try_case(sources: list[Source], seed: int, stage: str, path: Path) -> str:
    """What a case comes to: `ok`, or the name of an error of ours. Raises anything else."""
    try:
        data = make_case(sources, seed)
    except (OpReplayError, ValueError, OverflowError):
        return "not made"       # the helpers that build files refuse it themselves
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


# ------------------------------------------------------------------------------------------------------------ processes


def _work(stage: str, first: int, end: int, folder: Path) -> None:
    """Cases one after the other; notes the number of the one that runs, and what failed or was slow."""
    sys.stderr = open(folder / "stderr", "w")  # noqa: SIM115 - warnings of operators, for as long as the process
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work:
        sources = make_sources(Path(work))
        if stage == "run":
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        path, ended = Path(work) / "case.opreplay", Counter[str]()
        progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT)
        for seed in range(first, end):
            os.pwrite(progress, f"{seed:20d}".encode(), 0)
            signal.alarm(_LONGEST_CASE_S)
            try:
                ended[try_case(sources, seed, stage, path)] += 1
            except Exception as error:  # anything but an error of ours is what is looked for
                with open(folder / "failures", "a", encoding="utf-8") as file:
                    file.write(json.dumps([seed, f"{type(error).__name__}: {error}"[:300]]) + "\n")
        signal.alarm(0)
        (folder / "ended").write_text(json.dumps(ended))


def fuzz(stage: str, first: int, cases: int | None, *, batch: int = 2000, loud: bool = False) -> tuple[int, list[Any]]:
    """How many cases were tried, and the failures as [case, what]."""
    tried, failures, end = 0, [], None if cases is None else first + cases
    at, total, began = first, Counter[str](), time.monotonic()
    while end is None or at < end:
        stop = at + batch if end is None else min(at + batch, end)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            code = subprocess.call([sys.executable, "-m", "safety.fuzzing", "--worker", name, f"--stage={stage}",
                                    f"--seed={at}", f"--cases={stop - at}"],
                                   env={**os.environ, "PYTHONPATH": str(_TESTS)})
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
            print(f"{stage}: {tried} cases, {len(failures)} failed, {rate:.0f} a second; go on with --seed={at}  "
                  f"{dict(total)}", flush=True)
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
