"""The folder with one file of each rank of a job: what the files hold of collectives, and whether they fit together.

Imports no torch: `opreplay-check` says it, and a replay by all ranks asks before its first op.
"""

from __future__ import annotations

import glob
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any

import xxhash

from replayfmt.errors import CaptureNotFound, InvalidCapture, OpReplayError

from .codes import RecordKind
from .maintenance import CheckReport, check_capture
from .model import Record, TensorValue
from .output import RANK_FILE, new_file
from .reader import CaptureReader, open_capture
from .record_frames import decode_record

LAUNCH, WAIT = "opreplay::collective", "opreplay::collective_wait"  # the operators that stand for collectives
MANIFEST = "manifest.json"
_MANY = 64  # files: then it is worth starting processes
_AT_ONCE = 16  # files
_FEW = 16  # ranks, or ranges of them, that are listed

Event = dict[str, Any]  # a launch, or {"wait": the work that is waited for}


def rank_file(folder: str, rank: int) -> str:
    """The file of a rank: in the folder, or in one of its folders, as `-o 'out/{host}/'` writes them. Raises
    InvalidCapture if several of those have one."""
    name = RANK_FILE.format(rank=rank)
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        of_hosts = sorted(glob.glob(os.path.join(glob.escape(folder), "*", name)))
        if len(of_hosts) > 1:
            raise InvalidCapture(
                f"{folder}: rank {rank} has several files: {', '.join(of_hosts)}; name the folder of one job"
            )
        path = of_hosts[0] if of_hosts else path
    return path


def events_of(reader: CaptureReader) -> Iterator[Event]:
    """The launches and waits of a capture, in order."""
    kernels = {number: each.name for number, each in enumerate(reader.kernels) if each and each.name in (LAUNCH, WAIT)}
    wanted = {
        number: kernels[each.kernel]
        for number, each in enumerate(reader.signatures)
        if each is not None and each.kind is RecordKind.op and each.kernel in kernels
    }
    if not wanted:
        return
    for index in range(len(reader.record_frames)):
        frame = reader.frame(index)
        for row, signature in enumerate(frame.signature.tolist()):
            if signature in wanted:
                record = decode_record(frame, row, reader.definitions)
                try:
                    yield launch_of(record) if wanted[signature] == LAUNCH else {"wait": work_of(record)}
                except InvalidCapture as error:
                    raise InvalidCapture(f"{reader.path}: {error}") from None


_TEXTS = frozenset({"operator", "ranks", "reduction", "run"})
_LAUNCHED = ("operator", "ranks", "instance", "reduction", "peer", "tag", "number", "work", "run", "inputs", "outputs")


def launch_of(record: Record) -> Event:
    """What the record of a launch says; of its tensors, the dtypes and the numbers of elements. Raises InvalidCapture
    where it is not what a launch says."""
    said = _said(record, _LAUNCHED)
    members, peer = members_of(said["ranks"]), said["peer"]
    if not -1 <= peer < len(members):
        raise InvalidCapture(
            f"record {record.ordinal}: {LAUNCH}: peer={peer}, expected a rank of {len(members)}, or -1"
        )
    return said | {
        short: [[each.meta.dtype.name, math.prod(each.meta.sizes)] for each in said.pop(name)]
        for short, name in (("in", "inputs"), ("out", "outputs"))
    }


def work_of(record: Record) -> int:
    """The work that a launch begins, or a wait waits for. Raises InvalidCapture."""
    return int(_said(record, ("work",))["work"])


def _said(record: Record, names: Sequence[str]) -> Event:
    """Arguments of a launch or a wait, of the types that they have there. Raises InvalidCapture."""
    given = {node.name: value for node, value in zip(record.signature.args, record.args, strict=True)}
    for name in names:
        value, wanted = given.get(name), str if name in _TEXTS else list if name in ("inputs", "outputs") else int
        tensors = all(isinstance(each, TensorValue) for each in value) if isinstance(value, list) else True
        if type(value) is not wanted or not tensors:
            shown = repr(value)[:60]
            raise InvalidCapture(
                f"record {record.ordinal}: a collective's {name} is {shown if name in given else 'missing'}, expected "
                + {str: "text", int: "a number", list: "a list of tensors"}[wanted]
            )
    return {name: given[name] for name in names}


def describe(folder: str, rank: int, world: int, *, checked: bool = True) -> dict[str, Any]:
    """What a rank says of its file to the others. `checked`: every byte of it."""
    try:
        path = rank_file(folder, rank)
        if checked:
            check_capture(path, CheckReport(path))
        with open_capture(path) as reader:
            session = reader.session
            problems = []
            if session.rank != rank:
                problems.append(f"{path}: is the capture of rank {session.rank}")
            if session.world_size != world:
                problems.append(
                    f"{path}: was captured with {session.world_size} ranks, and there are {world}: "
                    f"torchrun --nproc-per-node={session.world_size}"
                )
            return {"problems": problems, "session": session.session_id, "events": list(events_of(reader))}
    except OpReplayError as error:
        return {"problems": [str(error)], "session": "", "events": []}


def describe_all(folder: str, world: int, *, checked: bool = True, processes: int = 1) -> list[dict[str, Any]]:
    """`describe` of every rank. More `processes` than one are for tools: they import the main module again."""
    described = partial(describe, folder, world=world, checked=checked)
    known: dict[Any, Event] = {}
    if world < _MANY or processes < 2:
        return [_with_shared(described(rank), known) for rank in range(world)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return [_with_shared(each, known) for each in pool.map(described, range(world), chunksize=_AT_ONCE)]


def _with_shared(rank: dict[str, Any], known: dict[Any, Event]) -> dict[str, Any]:
    """What a rank says, with the events that others have said already in the place of its own: ranks of one program
    launch the same collectives, and thousands of ranks would take the memory of thousands of each."""
    for place, event in enumerate(rank["events"]):
        key = tuple(str(each) if isinstance(each, list) else each for each in event.values())
        rank["events"][place] = known.setdefault(key, event)
    return rank


def judge(ranks: list[dict[str, Any]]) -> list[str]:
    """Why these files do not replay together; empty if they do."""
    found = [problem for each in ranks for problem in each["problems"]]
    if found:
        return found
    runs = defaultdict(list)
    for rank, each in enumerate(ranks):
        launched = [event for event in each["events"] if "wait" not in event]
        runs[launched[0]["run"] if launched else ""].append(rank)
    named = {run: members for run, members in runs.items() if run}
    if len(named) > 1:
        return ["the files are of several runs: " + "; ".join(f"ranks {listed(each)}" for each in named.values())]
    return _waits(ranks) or _sequences(ranks) or _pairs(ranks) or _deadlock(ranks)


def listed(ranks: Sequence[int]) -> str:
    """Ranks for people: many that follow each other as a range."""
    if len(ranks) <= _FEW:
        return ", ".join(map(str, ranks))
    breaks = [at for at in range(1, len(ranks)) if ranks[at] != ranks[at - 1] + 1]
    runs = [(ranks[a], ranks[b - 1]) for a, b in zip([0, *breaks], [*breaks, len(ranks)], strict=True)]
    shown = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in runs[:_FEW])
    return shown + (", ..." if len(runs) > _FEW else "")


def come_in_pairs(operator: str) -> bool:
    """Whether calls of an operator have a sender and a receiver each."""
    return "send" in operator or "recv" in operator


def _is_paired(event: Event) -> bool:
    return come_in_pairs(event["operator"])


def group_of(event: Event) -> tuple[tuple[int, ...], int]:
    return members_of(event["ranks"]), event["instance"]


@lru_cache(1 << 12)
def members_of(ranks: str) -> tuple[int, ...]:
    """The ranks of a group, in its order. Raises InvalidCapture for text that is no list of ranks."""
    try:
        members = tuple(map(int, ranks.split(",")))
    except ValueError:
        members = ()
    if not members or min(members) < 0 or len(set(members)) < len(members):
        raise InvalidCapture(f"{ranks[:60]!r} are not the ranks of a group, expected such as '0,1'")
    return members


def meeting(
    rank: int, operator: str, members: Sequence[int], instance: int, peer: int | None, tag: int, number: int
) -> Any:
    """What the calls of one collective have in common on all ranks. `peer`: of a pair, the rank of the other side; None
    where it takes what comes."""
    if not come_in_pairs(operator):
        return tuple(members), instance, number
    if peer is None:
        return rank, operator, number
    source, target = (rank, peer) if "send" in operator else (peer, rank)
    return source, target, tag, number


def meeting_of(rank: int, launch: Record) -> Any:
    """`meeting` of a launch in this rank's file."""
    try:
        said = launch_of(launch)
    except InvalidCapture as error:
        raise InvalidCapture(f"rank {rank}: {error}") from None
    members, instance = group_of(said)
    peer = members[said["peer"]] if said["peer"] >= 0 else None
    return meeting(rank, said["operator"], members, instance, peer, said["tag"], said["number"])


def _waits(ranks: list[dict[str, Any]]) -> list[str]:
    """Whether what is waited for is launched in the same file."""
    found = []
    for rank, each in enumerate(ranks):
        launched = {event["work"] for event in each["events"] if "wait" not in event}
        strays = {event["wait"] for event in each["events"] if "wait" in event} - launched
        if strays:
            found.append(
                f"rank {rank}: waits for collectives that are not launched in its file: {listed(sorted(strays))}"
            )
    return found


def _sequences(ranks: list[dict[str, Any]]) -> list[str]:
    """Whether the members of each group launch the same collectives on it, in the same order."""
    sequences: dict[Any, dict[int, list[tuple[Any, ...]]]] = defaultdict(lambda: defaultdict(list))
    said: dict[int, tuple[Any, ...]] = {}  # by id of an event, which ranks share
    for rank, each in enumerate(ranks):
        for event in each["events"]:
            if "wait" not in event and not _is_paired(event):
                if id(event) not in said:
                    reduced = event["in"] if "reduce" in event["operator"] else None
                    said[id(event)] = event["operator"], event["reduction"], event["peer"], reduced
                sequences[event["ranks"], event["instance"]][rank].append(said[id(event)])
    found = []
    for (ranks_text, _instance), by_rank in sequences.items():
        members = members_of(ranks_text)
        first = by_rank[members[0]]
        differing: dict[tuple[int, str], list[int]] = defaultdict(list)
        for rank in members[1:]:
            other = by_rank[rank]
            if other != first:
                at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), None)
                at = min(len(first), len(other)) if at is None else at
                differing[at, str(other[at] if at < len(other) else "nothing")].append(rank)
        found += [
            f"group of ranks {listed(members)}: collective {at} is {first[at] if at < len(first) else 'nothing'} on "
            f"rank {members[0]}, and {there} on {'rank' if len(others) == 1 else 'ranks'} {listed(others)}"
            for (at, there), others in differing.items()
        ]
    return found


def _pairs(ranks: list[dict[str, Any]]) -> list[str]:
    """Whether each receive has its send. (One from any source takes what comes.)"""
    sent: dict[Any, list[Any]] = defaultdict(list)
    received: dict[Any, list[Any]] = defaultdict(list)
    anywhere = 0
    for rank, each in enumerate(ranks):
        for event in each["events"]:
            if "wait" in event or not _is_paired(event):
                continue
            if event["peer"] < 0:
                anywhere += 1
                continue
            peer = group_of(event)[0][event["peer"]]
            if "send" in event["operator"]:
                sent[rank, peer, event["tag"]].append(event["in"])
            else:
                received[peer, rank, event["tag"]].append(event["out"])
    return [
        f"from rank {key[0]} to rank {key[1]}, tag {key[2]}: {len(sent[key])} sends and {len(received[key])} receives, "
        "or others in size"
        for key in sorted({*sent, *received})
        if not anywhere and sent[key] != received[key]
    ]


def _deadlock(ranks: list[dict[str, Any]]) -> list[str]:
    """Go through launches and waits as the ranks would: whether all of them reach the end."""
    places = [0] * len(ranks)
    launched: Counter[Any] = Counter()
    needs: list[dict[int, tuple[Any, int]]] = [{} for _ in ranks]  # by work: how many launches of what a wait takes
    moved = True
    while moved:
        moved = False
        for rank, each in enumerate(ranks):
            events = each["events"]
            while places[rank] < len(events):
                event = events[places[rank]]
                if "wait" in event:
                    needed, count = needs[rank].get(event["wait"], (None, 0))
                    if launched[needed] < count:
                        break
                else:
                    key, needed, count = _needs(rank, event)
                    launched[key] += 1
                    needs[rank][event["work"]] = needed, count
                places[rank] += 1
                moved = True
    stuck = [rank for rank, each in enumerate(ranks) if places[rank] < len(each["events"])]
    if not stuck:
        return []
    return [f"ranks {listed(stuck)} would wait for each other for ever: the captured order of collectives differs"]


def _needs(rank: int, event: Event) -> tuple[Any, Any, int]:
    """What the launch counts as, and how many launches of what its wait takes to end."""
    members = members_of(event["ranks"])
    if not _is_paired(event):
        key = event["ranks"], event["instance"], event["number"]
        return key, key, len(members)
    peer = members[event["peer"]] if event["peer"] >= 0 else -1
    if "send" in event["operator"]:
        return ("send", rank, peer, event["tag"], event["number"]), None, 0
    return "recv", ("send", peer, rank, event["tag"], event["number"]), int(peer >= 0)


def world_size(folder: str) -> int:
    """How many ranks the job had. Raises CaptureNotFound for a folder without a file of one."""
    for inside in ("", "*"):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), inside, "rank*.opreplay*"))):
            if path.endswith((".opreplay", ".opreplay.partial")):
                try:
                    with open_capture(path) as reader:
                        return reader.session.world_size
                except OpReplayError:
                    continue
    raise CaptureNotFound(
        f"{folder}: is a directory without captures of ranks (rank0.opreplay, ...), as opreplay-capture -o writes"
    )


def write_manifest(folder: str, *, checked: bool = True, processes: int = 1) -> dict[str, Any]:
    """Say in `manifest.json` what the folder holds; what was written. It can be made again at any time."""
    world = world_size(folder)
    said = describe_all(folder, world, checked=checked, processes=processes)
    sequences: dict[Any, list[Any]] = defaultdict(list)
    for rank, each in enumerate(said):
        for event in each["events"]:
            if "wait" not in event and not _is_paired(event) and members_of(event["ranks"])[0] == rank:
                sequences[group_of(event)].append((event["operator"], event["reduction"], event["peer"], event["in"]))
    runs = {event["run"] for each in said for event in each["events"] if event.get("run")}
    rows = []
    for rank, each in enumerate(said):
        path = rank_file(folder, rank)
        rows.append(
            {
                "rank": rank,
                "file": os.path.relpath(path, folder),
                "complete": bool(each["session"]),
                "session": each["session"] or None,
                "bytes": os.path.getsize(path) if os.path.isfile(path) else None,
                "collectives": sum("wait" not in event for event in each["events"]),
            }
        )
    manifest = {
        "world_size": world,
        "run": runs.pop() if len(runs) == 1 else None,
        "ranks": rows,
        "groups": [
            {
                "ranks": list(members),
                "instance": instance,
                "collectives": len(sequence),
                "sequence": xxhash.xxh3_128_hexdigest(json.dumps(sequence).encode()),
            }
            for (members, instance), sequence in sorted(sequences.items())
        ],
        "problems": judge(said),
    }
    with new_file(os.path.join(folder, MANIFEST), force=True) as out:
        out.write(json.dumps(manifest, indent=1).encode())
    return manifest


def is_whole(folder: str, world: int) -> bool:
    """Whether the files of all ranks are there, each once."""
    try:
        return all(os.path.isfile(rank_file(folder, rank)) for rank in range(world))
    except InvalidCapture:
        return False
