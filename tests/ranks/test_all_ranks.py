"""The folder of all ranks: checked before the first op, then replayed together, with real collectives."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.rank_files import describe, judge

from . import launching
from .test_one_rank import COLLECTIVES, WAITS


def together(folder: Path, *flags: str, rank_1: str = "") -> list[tuple[int, str]]:
    """Replay the folder `out`; `rank_1`: more flags of that rank alone."""
    flags = ("--verify=bitwise", "--collective-timeout=5", *flags, "out/")
    run = f"exec {launching.BIN / 'opreplay-run'} {' '.join(flags)} $([ $RANK = 1 ] && echo {rank_1!r})"
    return launching.launch(folder, "sh", "-c", run)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two ranks, captured without the results of its collectives: they have to be done again."""
    folder = tmp_path_factory.mktemp("job")
    launching.captured(folder, COLLECTIVES + WAITS, "--collective-results=none")
    return folder


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    shutil.copytree(job / "out", tmp_path / "out")
    return tmp_path


def test_all_ranks_replay_together_bit_for_bit(job: Path) -> None:
    (code, text), (other, silent) = together(job)
    assert (code, other) == (0, 0), text + silent
    assert "verified: bitwise" in text and "verified" not in silent


def run_tool(tool: str, *arguments: str) -> str:
    done = subprocess.run([launching.BIN / f"opreplay-{tool}", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def findings(folder: Path, world: int = 2) -> str:
    return "\n".join(judge([describe(str(folder / "out"), rank, world) for rank in range(world)]))


def test_files_that_do_not_belong_together_are_found_before_the_first_op(copy: Path, tmp_path: Path) -> None:
    out, spare = copy / "out", copy / "spare"
    manifest = json.loads((out / "manifest.json").read_text())  # whoever was captured last wrote it
    (out / "manifest.json").unlink()
    assert run_tool("check", str(out)).endswith("valid; manifest.json written\n")
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert manifest["problems"] == [] and [each["complete"] for each in manifest["ranks"]] == [True, True]
    assert [each["instance"] for each in manifest["groups"]] == [0, 1]
    rows = run_tool("dump", "--jq", 'select(.op == "opreplay::collective") | .rank', str(out)).split()
    assert rows.count("0") == rows.count("1") == manifest["ranks"][0]["collectives"]
    assert findings(copy) == ""
    assert "was captured with 2 ranks, and there are 3" in findings(copy, 3)
    (out / "rank0.opreplay").rename(spare)
    assert "rank0.opreplay" in findings(copy) and "no such file" in findings(copy).lower()
    (out / "rank1.opreplay").rename(out / "rank0.opreplay")
    spare.rename(out / "rank1.opreplay")
    refused = together(copy)
    assert [code for code, _text in refused] == [1, 1]
    said = "".join(text for _code, text in refused)
    assert said.count("rank0.opreplay: is the capture of rank 1") == 1  # by all ranks together
    edited = bytearray((out / "rank1.opreplay").read_bytes())
    edited[len(edited) // 2] ^= 1
    (out / "rank1.opreplay").write_bytes(edited)
    assert "rank1.opreplay" in findings(copy)


def test_a_rank_that_fails_ends_all_of_them(copy: Path) -> None:
    """Its exit code is everyone's, and those that wait for it say for which collective, and who has ended."""
    (code, text), (other, _why) = together(copy, rank_1="--device=cuda:7")
    assert code == other != 0
    assert "c10d::allreduce_, collective 0 of the group of ranks 0,1, did not end" in text
    assert "ranks that have ended: 1" in text


def event(operator: str, work: int, number: int = 0, peer: int = -1, ranks: str = "0,1", run: str = "a") -> Any:
    size = [["float32", 4]]
    rest = {"instance": 0, "reduction": "SUM", "tag": 0, "run": run, "in": size, "out": size}
    return {"operator": f"c10d::{operator}", "ranks": ranks, "peer": peer, "number": number, "work": work} | rest


def job_of(*events: list[Any]) -> list[dict[str, Any]]:
    return [{"problems": [], "session": str(rank), "events": each} for rank, each in enumerate(events)]


def test_sequences_that_would_hang_are_refused() -> None:
    """Other runs, another order, a receive without a send, and groups that are interleaved in another order."""
    first, second = event("allreduce_", 0), event("broadcast_", 1, number=1, peer=0)
    wait = {"wait": 0}
    assert judge(job_of([first, second, wait], [first, second, wait])) == []
    assert "several runs" in judge(job_of([first], [event("allreduce_", 0, run="b")]))[0]
    assert "collective 0 is" in judge(job_of([first, second], [second, first]))[0]
    assert "nothing on rank 1" in judge(job_of([first, second], [first]))[0]
    send, receive = event("send", 0, peer=1), event("recv_", 0, peer=0)
    assert judge(job_of([send, wait], [receive, wait])) == []
    assert "0 sends and 1 receives" in judge(job_of([], [receive]))[0]
    one, two = event("allreduce_", 0), event("allreduce_", 1) | {"instance": 1}
    waits = {"wait": 0}, {"wait": 1}
    crossed = job_of([one, waits[0], two, waits[1]], [two, waits[1], one, waits[0]])
    assert "wait for each other for ever" in judge(crossed)[0]
    assert judge(job_of([one, two, *waits], [two, one, *waits])) == []
