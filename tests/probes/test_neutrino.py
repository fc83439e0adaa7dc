"""Neutrino's probe files are read as they are, and save what ours do; what they have and ours have not is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from replayfmt.errors import UsageError
from replayfmt.probes.costs import LAYOUTS
from replayfmt.probes.definitions import find_probe, parse_probe
from replayfmt.probes.recordings import LaunchShape, write_recording

from .interpreter import SM
from .test_interpreted import BYTES, CASES, recorded, texts
from .test_report import is_picture, ran

RELEASE = {
    "bytes": """
author = "someone"
description = "how many bytes"
analyze_hook = "bytes.py"
[saving]
position = "kernel"
datamodel = "thread:8"
before = '''.reg .u32 %loaded; // of loads and stores
.reg .u32 %copied;
mov.u32 %loaded, 0;
mov.u32 %copied, 0; '''
after = "SAVE.u32 {%loaded, %copied};"
[memory]
position = "ld.global:st.global"
before = "add.u32 %loaded, %loaded, BYTES;"
[copies]
position = "cp.async.ca:cp.async.cg"
before = "add.u32 %copied, %copied, IN2;"
""",
    "warps": """
author = "someone"
[sched]
position = "kernel"
datamodel = "warp:16"
before = '''.reg .b64 %from; // cycles
.reg .b64 %took;
.reg .b32 %short;
mov.u64 %from, %clock64;'''
after = '''mov.u64 %took, %clock64;
sub.u64 %took, %took, %from;
cvt.u32.u64 %short, %took;
SAVE.u64 {%from};
SAVE.u32 {%short, %smid};'''
""",
    "accesses": """
dynamic = true
[init]
position = "kernel"
before = ".reg .u64 %from; .reg .u64 %now; mov.u64 %from, %clock64;"
[memory]
position = "ld.global:st.global:cp.async.cg:cp.async.ca"
datamodel = "thread:16:count"
before = "mov.u64 %now, %clock64; sub.u64 %now, %now, %from; SAVE.u64 {%now, ADDR};"
""",
    "branches": """
[bra]
position = "bra"
datamodel = "thread:8:128"
no_pred = true
before = "mov.u64 %now, %clock64;\\nSAVE.u64 {%now};"
""",
}
MAIN = {
    "bytes": """
regs = 3
CALLBACK = "bytes.py"
[map.Bytes]
level = "thread"
type = "array"
size = 8
cap = 1
regs = {loaded = ["u32"], copied = ["u32"]}
[probe.save]
level = "thread"
pos = "kernel"
after = "SAVE [ Bytes ] { %NR0, %NR1 }"
[probe.memory]
level = "thread"
pos = "ld.global:st.global"
after = "add.u64 %NR0, %NR0, BYTES;"
[probe.copies]
level = "thread"
pos = "cp.async.ca:cp.async.cg"
after = "add.u64 %NR1, %NR1, BYTES;"
""",
    "warps": """
[map.sched]
level = "warp"
type = "array"
size = "16"
cap = "1"
[probe.all]
position = "kernel"
level = "warp"
register = {"u32" = 3, "u64" = 2}
before = '''.reg .b64 %PD<2>;
.reg .b32 %P<2>;
mov.u64 %PD0, %clock64;'''
after = '''mov.u64 %PD1, %clock64;
sub.u64 %PD1, %PD1, %PD0;
cvt.u32.u64 %P0, %PD1;
{ .reg .b32 %tmp; mov.u32 %tmp, %smid; mov.u32 %P1, %tmp; }
SAVE [ sched ] {%PD0, %P0, %P1};'''
""",
    "branches": """
[map.Sample]
level = "thread"
type = "array"
size = 8
cap = 128
regs = {clock = ["u64"]}
[probe.bra]
level = "thread"
pos = "bra"
after = "mov.u64 %NR0, %clock64;\\nSAVE [ Sample ] { %NR0 }"
""",
}
FORMS = [RELEASE, MAIN]


@pytest.mark.parametrize("form", FORMS, ids=["release", "main"])
@pytest.mark.parametrize("name", ["triton_matmul", "cuda_saxpy", "cuda_fill"])
def test_the_bytes_that_a_probe_of_neutrino_counts_are_those_of_the_arithmetic(form: dict[str, str], name: str) -> None:
    probe = parse_probe(form["bytes"], "some/bytes.toml")
    assert (probe.name, probe.record_bytes, probe.each_site) == ("bytes", 8, False)
    _found, records, _counts = recorded(CASES[name], texts(CASES[name])[0], probe)
    assert tuple(int(records[field].sum()) for field in ("loaded", "copied")) == BYTES[name]


@pytest.mark.parametrize("form", FORMS, ids=["release", "main"])
def test_warps_accesses_and_branches_are_those_that_the_kernel_had(form: dict[str, str]) -> None:
    case = CASES["cuda_saxpy"]
    text = texts(case)[0]
    _found, _device, counts = case.run(text)
    _found, warps, _counts = recorded(case, text, parse_probe(form["warps"], "warps.toml"))
    start, elapsed, sm = (warps[name] for name in warps.dtype.names)
    assert (sm == SM).all() and (start > 0).all() and (elapsed > 0).all() and warps.dtype.itemsize == 16
    _found, passed, _counts = recorded(case, text, parse_probe(form["branches"], "branches.toml"))
    assert ((passed[passed.dtype.names[0]] != 0).sum(axis=2) == counts["branch"]).all()
    _found, accesses, _counts = recorded(case, text, parse_probe(RELEASE["accesses"], "accesses.toml"))
    reached = counts["global_load"] + counts["global_store"] + counts["async_copy"]
    assert ((accesses["address"] != 0).sum(axis=2) == reached).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("IN2", "IN1"), "copies.before: expected ADDR or BYTES"),
        (("ld.global:st.global", "ld.shared"), "memory.position: expected kernel, or some of ld.global"),
        (("thread:8", "block:8"), "saving.datamodel: expected LEVEL:BYTES"),
        (("{%loaded, %copied}", "{%loaded, 7}"), "saving.after: expected registers or ADDR to save"),
        (("[copies]", "[REGS]"), "REGS: expected a table with PTX (probes for AMD's GPUs are not read)"),
        (('position = "kernel"', "position = 3"), "saving.position: expected a string"),
        (("add.u32 %loaded", "@%p add.u32 %loaded"), "one instruction with its semicolon, no guard"),
    ],
)
def test_what_has_no_equal_is_named(change: tuple[str, str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_probe(RELEASE["bytes"].replace(*change), "bytes.toml")
    assert words in str(refused.value)
    with pytest.raises(UsageError, match="one of the maps Bytes"):
        parse_probe(MAIN["bytes"].replace("SAVE [ Bytes ]", "SAVE [ Others ]"), "bytes.toml")


def test_the_records_of_shipped_probes_are_those_of_the_reports_of_their_names() -> None:
    assert all(layouts[0] == find_probe(kind).layout for kind, layouts in LAYOUTS.items())


@pytest.mark.parametrize("place", [0, 1], ids=["ours", "neutrinos"])
def test_a_report_says_how_many_bytes_threads_moved(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = np.zeros((3, 64, 1), LAYOUTS["gmem_bytes"][place].dtype)
    records["sync_bytes"][1] = 12
    records["async_bytes"][2, :32] = 16
    write_recording(tmp_path / "1.bin", LaunchShape((3, 1, 1), (64, 1, 1)), [records])
    assert ran(monkeypatch, "report", "gmem_bytes", tmp_path / "1.bin", "-o", tmp_path / "out", "--no-picture") == 0
    assert "sync_bytes_total" in capsys.readouterr().out
    tables = json.loads((tmp_path / "out/gmem_bytes.json").read_text())["tables"]
    (whole,) = tables["whole launch"]
    assert (whole["sync_bytes_total"], whole["async_bytes_total"]) == (12 * 64, 16 * 32)
    assert (whole["threads"], whole["threads_with_async_bytes"]) == (192, 32)
    assert [(row["block"], row["sync_bytes_and_async_bytes"]) for row in tables["blocks with most"]] == [
        (1, 768), (2, 512), (0, 0),
    ]  # fmt: skip


@pytest.mark.slow
def test_reports_of_progress_and_of_matrix_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clocks = np.zeros((2, 32, 4), LAYOUTS["progress"][0].dtype)
    clocks["clock"][0] = [100, 150, 250, 0]
    clocks["clock"][1, :, 0] = 9000
    write_recording(tmp_path / "p.bin", LaunchShape((2, 1, 1), (32, 1, 1)), [clocks])
    assert ran(monkeypatch, "report", "progress", tmp_path / "p.bin", "-o", tmp_path) == 0
    (whole,) = json.loads((tmp_path / "progress.json").read_text())["tables"]["whole launch"]
    assert whole["samples_total"] == 32 * 4 and whole["step_min_cycles"] == 50 and whole["step_max_cycles"] == 100
    assert is_picture(tmp_path, "progress")
    counts = np.full((2, 32, 1), 8, LAYOUTS["tensorop_count"][0].dtype)
    write_recording(tmp_path / "t.bin", LaunchShape((2, 1, 1), (32, 1, 1)), [counts])
    assert ran(monkeypatch, "report", "tensorop_count", tmp_path / "t.bin", "-o", tmp_path, "--no-picture") == 0
    (whole,) = json.loads((tmp_path / "tensorop_count.json").read_text())["tables"]["whole launch"]
    assert whole["count_total"] == 512 and whole["count_median_of_a_thread"] == 8
    capsys.readouterr()
    assert ran(monkeypatch, "report", "progress", tmp_path / "absent.bin", "-o", tmp_path, "--force") != 0
    write_recording(tmp_path / "o.bin", LaunchShape((2, 1, 1), (32, 1, 1)), [np.zeros((2, 32, 1), "u4,u4,u4")])
    assert ran(monkeypatch, "report", "gmem_bytes", tmp_path / "o.bin", "-o", tmp_path) == 3
    assert "these are the records of another probe" in capsys.readouterr().err
