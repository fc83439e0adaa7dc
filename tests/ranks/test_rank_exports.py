"""What is exported of all ranks: Chakra's traces, read back by the published field numbers and run by the rules of
ASTRA-sim, and one timeline."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export.test_perfetto import checked
from format import test_races

from replayfmt.export.chakra import export_chakra
from replayfmt.format.codes import RecordKind, ValueKind
from replayfmt.format.model import Node as ValueNode
from replayfmt.format.model import Signature
from replayfmt.report.pictures import MissingPicture, TimelinePicture
from replayfmt.report.rank_contents import make_rank_contents

from . import launching

pytestmark = pytest.mark.usefixtures("sooner")
PROGRAM = """
half = dist.new_group([0, 1])
weight = torch.randn(64, 64)
big = torch.ones(1 << 12) * rank
work = dist.all_reduce(big, async_op=True)
beside = weight.mm(weight)          # needs nothing of it
work.wait()
after = big.add(1)                  # needs it
dist.all_reduce(beside, group=half)
parts = [torch.empty(64, 64) for _ in range(world)]
dist.all_gather(parts, beside)
shard = torch.empty(8); dist.reduce_scatter_tensor(shard, torch.ones(8 * world))
if rank == 0:
    dist.send(after, 1, tag=5)
else:
    dist.recv(after, 0, tag=5)
dist.broadcast(shard, 0)
there, back = torch.ones(8), torch.empty(8)
for each in dist.batch_isend_irecv([dist.P2POp(dist.isend, there, 1 - rank), dist.P2POp(dist.irecv, back, 1 - rank)]):
    each.wait()
give, take = [[1, 3], [2, 4]][rank], [[1, 2], [3, 4]][rank]
dist.all_to_all_single(torch.empty(sum(take)), torch.ones(sum(give)), take, give)
dist.scatter(torch.empty(4), [torch.ones(4), torch.ones(4)] if rank == 0 else None, 0)
parts[0].narrow(0, 0, 8).fill_(2); read = parts[0].narrow(0, 8, 8).add(1)
same = big.as_strided(big.shape, (1,))  # the same tensor again: no work
print(read.sum().item() * 0)
"""
COMP, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
ALL_TO_ALL = 6
Wire = dict[int, list[Any]]


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> Wire:
    """The fields of a protobuf message, by number."""
    found: Wire = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        assert key & 7 in (0, 2)
        value: Any
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        found[key >> 3].append(value)
    return found


def packed(parts: list[bytes]) -> Iterator[int]:
    for part in parts:
        at = 0
        while at < len(part):
            value, at = varint(part, at)
            yield value


@dataclass
class Node:
    id: int
    name: str
    type: int
    data: list[int]
    order: list[int]
    micros: int
    attributes: dict[str, Any]

    @property
    def before(self) -> set[int]:
        return {*self.data, *self.order}


def attributes(listed: list[bytes]) -> dict[str, Any]:
    said = {}
    for each in map(fields, listed):
        (number,) = each.keys() - {1}
        value = each[number][0]
        said[each[1][0].decode()] = value.decode() if number == 29 else bool(value) if number == 27 else value
    return said


def trace(path: Path) -> tuple[dict[str, Any], list[Node]]:
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        length, at = varint(data, at)
        messages.append(fields(data[at : at + length]))
        at += length
    head, *nodes = messages
    assert head[1] == [b"0.0.4"]
    return attributes(head[2]), [
        Node(
            each[1][0],
            each[2][0].decode(),
            each[3][0],
            list(packed(each[5])),
            list(packed(each[4])),
            (each[7] or [0])[0],
            attributes(each[10]),
        )
        for each in nodes
    ]


def simulated(ranks: list[list[Node]], groups: dict[str, list[int]]) -> set[str]:
    """Run the nodes as a simulator does, each when those before it are done and its partners have come to it; what is
    left in the end, which is nothing where the job runs through."""
    done: list[set[int]] = [set() for _ in ranks]
    left = [{node.id: node for node in nodes} for nodes in ranks]
    everyone = list(range(len(ranks)))
    while True:
        ready = [[node for node in nodes.values() if node.before <= done[rank]] for rank, nodes in enumerate(left)]
        waiting: dict[Any, dict[int, Node]] = defaultdict(dict)
        finished: list[tuple[int, Node]] = []
        for rank, nodes in enumerate(ready):
            for node in nodes:
                said = node.attributes
                if node.type == COLLECTIVE:
                    assert not said["is_cpu_op"]
                    uneven = said["comm_type"] == ALL_TO_ALL  # each rank sends what it has
                    size = None if uneven else said["comm_size"]
                    waiting[said["pg_name"], said["comm_type"], size].setdefault(rank, node)
                elif node.type in (SEND, RECEIVE):
                    assert said["comm_src" if node.type == SEND else "comm_dst"] == rank
                    pair = said["comm_src"], said["comm_dst"], said["comm_tag"], said["comm_size"]
                    waiting[pair].setdefault(rank, node)
                else:
                    finished.append((rank, node))
        for key, by_rank in waiting.items():
            members = groups.get(key[0], everyone) if isinstance(key[0], str) else key[:2]
            if sorted(by_rank) == sorted(members):
                finished += by_rank.items()
        if not finished:
            return {f"{rank}: {node.name}" for rank, nodes in enumerate(left) for node in nodes.values()}
        for rank, node in finished:
            done[rank].add(node.id)
            del left[rank][node.id]


def export(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["opreplay-export", "--format=chakra", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> Path:
    folder = tmp_path_factory.mktemp("job")
    launching.captured(folder, PROGRAM)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", str(commands), prepend=os.pathsep)
        done = export(folder, "out/", "traces")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "known duration" not in done.stdout
    assert "ASTRA-sim does not simulate c10d::scatter_ (2)" in done.stdout
    return folder


def ranks_of(folder: Path) -> list[list[Node]]:
    return [trace(folder / "traces" / f"chakra.{rank}.et")[1] for rank in range(launching.WORLD)]


@pytest.mark.slow
def test_a_job_runs_through_a_simulator_and_every_communication_finds_its_partners(job: Path) -> None:
    groups = json.loads((job / "traces" / "comm_groups.json").read_text())
    assert groups == {"1": [0, 1]}
    ranks = ranks_of(job)
    for rank, nodes in enumerate(ranks):
        said, _nodes = trace(job / "traces" / f"chakra.{rank}.et")
        assert (said["rank"], said["world_size"]) == (rank, 2)
        for node in nodes:
            assert all(each < node.id for each in node.before)
        kinds = [node.attributes["comm_type"] for node in nodes if node.type == COLLECTIVE]
        assert kinds == [0, 0, 2, 7, 5, 6, 4]
    assert simulated(ranks, groups) == set()
    without = [[node for node in nodes if rank == 0 or node.type != RECEIVE] for rank, nodes in enumerate(ranks)]
    assert any("send" in each for each in simulated(without, groups))


def above(nodes: list[Node], node: Node) -> set[int]:
    """All that come before a node."""
    by_id = {each.id: each for each in nodes}
    found, open_ = set(), [node.id]
    while open_:
        for each in by_id[open_.pop()].before - found:
            found.add(each)
            open_.append(each)
    return found


@pytest.mark.slow
def test_dependencies_are_those_of_the_data_and_of_waits(job: Path) -> None:
    nodes = ranks_of(job)[0]
    first = next(node for node in nodes if node.type == COLLECTIVE)
    (product,) = (node for node in nodes if node.name == "aten::mm.default")
    assert first.id < product.id and first.id not in above(nodes, product)
    after = next(node for node in nodes if node.name == "aten::add.Tensor" and node.id > product.id)
    assert first.id in after.data
    filled = next(node for node in nodes if node.name.startswith("aten::fill_"))
    read = next(node for node in nodes if node.name == "aten::add.Tensor" and node.id > filled.id)
    assert filled.id not in read.data  # other bytes of the same memory
    assert not any("as_strided" in node.name for node in nodes)


@pytest.mark.slow
def test_durations_add_up_and_may_be_measured_ones(job: Path) -> None:
    for nodes in ranks_of(job):
        ops = [node for node in nodes if node.type == COMP]
        assert all(node.attributes["duration_ns"] > 0 for node in ops)
        assert sum(node.micros for node in ops) == sum(node.attributes["duration_ns"] for node in ops) // 1000
    for rank in range(launching.WORLD):
        per_op = ("--per-op", "--benchmark-min-time=2x", f"--benchmark-out=isolated{rank}.json")
        command = ["opreplay-benchmark", *per_op, f"out/rank{rank}.opreplay"]
        subprocess.run(command, cwd=job, check=True, capture_output=True, timeout=120)
    assert export(job, "--benchmark=isolated{rank}.json", "out/", "isolated").returncode == 0
    rows = json.loads((job / "isolated1.json").read_text())["benchmarks"]
    (product,) = (row["median_real_time"] for row in rows if row["op"] == "aten::mm.default")
    _said, nodes = trace(job / "isolated" / "chakra.1.et")
    (node,) = (node for node in nodes if node.name == "aten::mm.default")
    assert node.attributes["duration_ns"] == round(product)
    done = export(job, "--benchmark=times{rank}.json", "out/", "measured")
    assert done.returncode == 2 and "times0.json" in done.stderr and not (job / "measured").exists()


def test_streams_events_and_waits_of_the_host_order_work_that_shares_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_races, "SESSION", replace(test_races.SESSION, rank=0, world_size=1))
    program = test_races.Program(tmp_path / "a.opreplay")
    x, y = program.tensor(), program.tensor()
    program.write(1, x)  # node 1
    program.write(1, x)  # 2: after 1 on its stream
    program.write(2, y)  # 3: after nothing
    program.edge(1, 2)
    program.write(2, y)  # 4: after 2, of which the event tells
    program.write(0, program.tensor())  # 5: after nothing
    where = (ValueNode(ValueKind.device, "device", program.gpu), ValueNode(ValueKind.int, "stream"))
    program.records.add(Signature(RecordKind.stream_synchronize, where), ints=(2,))
    program.write(0, program.tensor())  # 6: after 5, and after 4, for which the host waited
    program.races()
    export_chakra(str(program.path), str(tmp_path / "traces"))
    _said, nodes = trace(tmp_path / "traces" / "chakra.0.et")
    assert [node.before for node in nodes] == [set(), {1}, set(), {2, 3}, set(), {4, 5}]
    assert not any(node.attributes["is_cpu_op"] for node in nodes)


@pytest.mark.slow
def test_what_no_simulator_can_run_is_refused_in_one_error(job: Path, tmp_path: Path) -> None:
    alone = export(job, "out/rank0.opreplay", str(tmp_path / "alone"))
    assert alone.returncode == 2 and "is one of 2 ranks" in alone.stderr
    again = export(job, "out/", "traces")
    assert again.returncode == 1 and "exists already" in again.stderr
    assert export(job, "--force", "out/", "traces").returncode == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("")
    assert "is not replaced" in export(job, "--force", "out/", str(tmp_path / "mine")).stderr
    part = export(job, "--ops=0:5", "out/", str(tmp_path / "part"))
    assert part.returncode == 2 and "opreplay-trim" in part.stderr
    launching.captured(tmp_path, "t = torch.ones(2)\ndist.recv(t) if rank else dist.send(t, 1)\n")
    anyone = export(tmp_path, "out/", "traces")
    assert anyone.returncode == 1 and "its sender is not known" in anyone.stderr
    assert not (tmp_path / "traces").exists()


@pytest.mark.slow
def test_one_timeline_has_all_ranks_and_arrows_between_their_collectives(job: Path) -> None:
    command = ["opreplay-export", "--format=perfetto", "out/", "job.json"]
    done = subprocess.run(command, cwd=job, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = checked(json.loads((job / "job.json").read_text()))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0: host", "rank 1: host"} <= set(names.values())
    slices = {(event["pid"], event["tid"], event["ts"]): event for event in events if event["ph"] == "X"}
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append((event["ph"], slices[event["pid"], event["tid"], event["ts"]], event["pid"]))
    assert len(flows) == 10  # seven collectives, and three sends with their receives
    for (begin, one, _pid), (end, other, pid) in flows.values():
        assert (begin, end) == ("s", "f") and one["ts"] <= other["ts"] and one["pid"] != pid
        assert one["name"] == other["name"] == "opreplay::collective.default"
    refused = subprocess.run([*command, "--force", "--benchmark=x.json"], cwd=job, capture_output=True, text=True)
    assert refused.returncode == 2 and "does not go with the folder of all ranks" in refused.stderr


@pytest.mark.slow
def test_a_page_compares_the_ranks(job: Path) -> None:
    """Each collective once, with who came last; launches are linked across lanes, and waits have taken their time."""
    contents = make_rank_contents(str(job / "out"), None)
    ranks, together, collectives, timeline = contents.sections
    assert [row.cells[2].text for row in ranks.tables[0].rows] == ["10", "10"]
    waits = [row.cells[5].sort for row in ranks.tables[0].rows]
    assert all(isinstance(wait, float) and wait > 0 for wait in waits)
    rows = collectives.tables[0].rows
    assert len(rows) == 10 and {row.cells[5].text for row in rows} <= {"0", "1"}  # sends meet their receives
    (missing,), (picture,) = together.pictures, timeline.pictures
    assert isinstance(missing, MissingPicture) and "torchrun" in missing.reason
    assert isinstance(picture, TimelinePicture)
    bars = picture.timeline.bars
    launches = np.isin(bars.name, picture.linked)
    lanes = defaultdict(set)
    for site, lane in zip(bars.site[launches].tolist(), bars.lane[launches].tolist(), strict=True):
        lanes[site].add(picture.timeline.lanes[lane].partition(",")[0])
    assert {f"site-{site}" for site in lanes} == {row.name for row in rows}
    assert all(each == {"rank 0", "rank 1"} for each in lanes.values())
    command = ["opreplay-report", "out/", "-o", "job.html"]
    assert subprocess.run(command, cwd=job, capture_output=True, timeout=120).returncode == 0
    refused = subprocess.run([*command, "--force", "--energy=x"], cwd=job, capture_output=True, text=True)
    assert refused.returncode == 2 and "is for the capture of one rank" in refused.stderr
    alone = ("out/rank0.opreplay", "--benchmark-min-time=2x", "--benchmark-out=alone.json")
    subprocess.run(["opreplay-benchmark", *alone], cwd=job, check=True, capture_output=True)
    refused = subprocess.run([*command, "--force", "--benchmark=alone.json"], cwd=job, capture_output=True, text=True)
    assert refused.returncode == 2 and "one rank alone" in refused.stderr
