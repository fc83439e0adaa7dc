"""No kernel passes by cheating or by accident, each is told why, and honest ones of other numerics pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools

from replayfmt.benchmark.candidates.judged import judge, run_judge
from replayfmt.benchmark.candidates.task_calls import synchronize
from replayfmt.benchmark.candidates.task_cases import Options
from replayfmt.benchmark.candidates.task_judging import REASONS
from replayfmt.benchmark.per_op.roofline import Peaks

from .candidates import ADDMM, CHEATS, HONEST, RIGHT, SOFTMAX, cheat, honest
from .conftest import Exported

KERNELS = {"addmm": "aten::addmm", "softmax": "aten::_softmax", "mm": "aten::mm"}
UNTIMED = Options(min_time_s=0)


def judged(task: Path, folder: Path, texts: dict[str, str], options: Options = UNTIMED) -> dict[str, dict[str, Any]]:
    """What the judge finds on kernels given as texts, by their names."""
    folder.mkdir(exist_ok=True)
    files = {str(folder / f"{name.replace(' ', '_')}.py"): name for name in texts}
    for file, name in files.items():
        Path(file).write_text(texts[name])
    found = run_judge(str(task), list(files), options)
    assert found["reference"]["ok"]
    return {files[each["candidate"]]: each for each in found["candidates"]}


@pytest.fixture(scope="module")
def verdicts(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    task = exported(kernel="aten::addmm")
    texts = {name: cheat(name, str(task)) for name in CHEATS}
    return judged(task, tmp_path_factory.mktemp("cheats"), texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_a_kernel_that_cheats_is_rejected_for_the_reason_that_it_deserves(
    name: str, verdicts: dict[str, dict[str, Any]]
) -> None:
    found = verdicts[name]
    assert (found["verdict"], found["faults"] != []) == (CHEATS[name][0], True), found["text"]
    assert found["text"]


@pytest.mark.slow
def test_a_wrong_element_is_shown_with_its_place_and_both_values(verdicts: dict[str, dict[str, Any]]) -> None:
    found = verdicts["one element is off"]
    worst = found["worst"]
    assert (worst["beyond"], worst["where"]) == (1, "result 0")
    assert worst["index"][1] in (63, 127)  # of the layer that took longer when it was captured: it is judged first
    assert float(worst["got"]) - float(worst["expected"]) == pytest.approx(0.01, rel=1e-3)
    assert found["case"].startswith("w0")


def test_every_reason_but_the_limits_has_a_kernel_that_shows_it() -> None:
    shown = {reason for reason, _before, _body in CHEATS.values()}
    assert set(REASONS) - shown == {"out of time", "out of memory"}
    assert len(CHEATS) >= 25 and sum(map(len, HONEST.values())) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("task", KERNELS)
def test_honest_kernels_of_other_numerics_are_accepted(task: str, exported: Exported, tmp_path: Path) -> None:
    texts = {name: honest(task, name) for name in HONEST[task]}
    found = judged(exported(kernel=KERNELS[task]), tmp_path / "honest", texts)
    assert {name: each["text"] for name, each in found.items() if each["verdict"] != "accepted"} == {}


@pytest.mark.slow
def test_an_output_that_passes_by_tolerance_alone_is_rejected(exported: Exported, tmp_path: Path) -> None:
    """A difference of large numbers is smaller than what rounding of its inputs explains."""
    import torch

    import replayfmt

    path = tmp_path / "large.opreplay"
    with replayfmt.capture(path):
        torch.manual_seed(0)
        x = torch.randn(8, 8) * 1e6
        torch.sub(x, x * (1 + 1e-7))
    head = "import torch\ndef sub(self, other, *, alpha=1):\n    return "
    texts = {
        "zeros": head + "torch.zeros(8, 8)\n",
        "noise": head + "torch.sin(torch.arange(64.0) ** 2).view(8, 8) * 0.1\n",
        "the other way round": head + "self + other * -alpha\n",
    }
    found = judged(exported(path, kernel="aten::sub"), tmp_path / "c", texts)
    verdicts = {name: (each["verdict"], "within the tolerance" in each["text"]) for name, each in found.items()}
    assert verdicts == {
        "zeros": ("uncorrelated", True),
        "noise": ("uncorrelated", True),
        "the other way round": ("accepted", False),
    }


@pytest.mark.slow
def test_variants_find_what_is_right_for_the_captured_values_and_sizes_only(exported: Exported, tmp_path: Path) -> None:
    task = exported(kernel="aten::_softmax")
    texts = {
        "honest": honest("softmax", "by parts"),
        "not for NaN": "import torch\ndef _softmax(self, dim, half_to_float):\n    x = self.nan_to_num()\n"
        "    e = torch.exp(x - x.amax(dim, True))\n    return e / e.sum(dim, True)\n",
        "not for odd sizes": "import torch\ndef _softmax(self, dim, half_to_float):\n"
        "    assert self.shape[1] % 2 == 0\n    e = torch.exp(self - self.amax(dim, True))\n"
        "    return e / e.sum(dim, True)\n",
        "not for no rows": "import torch\ndef _softmax(self, dim, half_to_float):\n"
        "    e = torch.exp(self - self[:1].max() * 0 - self.amax(dim, True))\n    return e / e.sum(dim, True)\n",
    }
    found = judged(task, tmp_path / "c", texts, Options(min_time_s=0, variants=True))
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {
        "honest": "accepted",
        "not for NaN": "captured values only",
        "not for odd sizes": "raises",
        "not for no rows": "raises",
    }
    without = judged(task, tmp_path / "c", texts)
    assert {each["verdict"] for each in without.values()} == {"accepted"}


@pytest.mark.slow
def test_a_guard_page_names_the_argument_and_the_side_that_a_kernel_reads(exported: Exported, tmp_path: Path) -> None:
    look = "import ctypes, torch\n" + ADDMM + "    at = {}.data_ptr() + ({})\n"
    look += f"    seen = ctypes.c_float.from_address(at).value\n    return {RIGHT} + 0.0 * (seen != seen + 1 and 0.0)\n"
    texts = {
        "after": look.format("mat1", "mat1.nbytes + 64"),
        "before": look.format("self", "-64"),
        "honest": honest("addmm", "split sums"),
    }
    task = exported(kernel="aten::addmm")
    found = judged(task, tmp_path / "c", texts, Options(min_time_s=0, guard=True))
    assert found["honest"]["verdict"] == "accepted"
    assert found["after"]["verdict"] == found["before"]["verdict"] == "crashed"
    assert found["after"]["text"].endswith("it touched memory after argument mat1")
    assert found["before"]["text"].endswith("it touched memory before argument self")


@pytest.mark.slow
def test_a_kernel_that_is_right_until_it_is_timed_is_rejected(exported: Exported, tmp_path: Path) -> None:
    texts = {
        "counts its calls": f"import torch\nCALLS, LAST = [0], {{}}\n{ADDMM}    CALLS[0] += 1\n"
        "    key = mat1.shape, mat2.shape\n    if CALLS[0] > 60 and key in LAST: return LAST[key].clone()\n"
        f"    LAST[key] = {RIGHT}\n    return LAST[key]\n",
        "knows a part of its inputs": f"import torch\nLAST = {{}}\n{ADDMM}"
        "    key = mat1.shape, *mat1.view(-1)[:8].tolist()\n"
        f"    if key not in LAST: LAST[key] = {RIGHT}\n    return LAST[key].clone()\n",
        "sees which calls are judged": f"import sys, torch\nCALLS = [0]\n{ADDMM}    CALLS[0] += 1\n"
        "    names = sys._getframe(1).f_locals\n    names = names if 'rounds' in names else sys._getframe(2).f_locals\n"
        f"    judged = names.get('last') or names.get('rounds') in names.get('judged', ())\n"
        f"    return {RIGHT} if CALLS[0] < 60 or judged else torch.zeros(mat1.shape[0], mat2.shape[1])\n",
        "works on when it is timed": "import time, torch\nfrom concurrent.futures import ThreadPoolExecutor\n"
        f"CALLS, POOL = [], ThreadPoolExecutor(1)\n{ADDMM}    CALLS.append(1)\n"
        f"    right = {RIGHT}\n    if len(CALLS) < 60: return right\n    out = torch.empty(len(mat1), mat2.shape[1])\n"
        "    POOL.submit(lambda: (time.sleep(0.001), out.copy_(right))); return out\n",
        "stops the clock when it is timed": f"import time, torch\nCALLS = []\n{ADDMM}    CALLS.append(1)\n"
        f"    if len(CALLS) == 60: time.perf_counter_ns = lambda: 0\n    return {RIGHT}\n",
        "the original when it is timed": f"import torch\nCALLS = []\n{ADDMM}    CALLS.append(1)\n"
        f"    return {RIGHT} if len(CALLS) < 60 else torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)\n",
        "never sees the same inputs in two timed calls": f"import torch\nSEEN = set()\n{ADDMM}"
        "    key = tuple(bytes(each.contiguous().view(torch.uint8).view(-1).tolist()) for each in (self, mat1, mat2))\n"
        f"    assert len(SEEN) < 60 or key not in SEEN\n    SEEN.add(key)\n    return {RIGHT}\n",
        "honest": honest("addmm", "split sums"),
    }
    found = judged(exported(kernel="aten::addmm"), tmp_path / "c", texts, Options(min_time_s=0.02))
    assert found.pop("the original when it is timed")["verdict"] == "calls the original"
    assert found.pop("works on when it is timed")["verdict"] in ("late work", "cached")
    assert found.pop("stops the clock when it is timed")["verdict"] == "global state"
    assert found.pop("sees which calls are judged")["verdict"] == "reads the task"
    assert found["honest"]["verdict"] == "accepted" and len(found["honest"]["timed"]) == 4
    assert found.pop("never sees the same inputs in two timed calls")["verdict"] == "accepted"
    for name, each in found.items():
        assert name == "honest" or (each["verdict"], "in a timed call" in each["text"]) == ("cached", True), each[
            "text"
        ]


@pytest.mark.slow
def test_a_kernel_has_a_limit_of_time_and_of_memory(exported: Exported, tmp_path: Path) -> None:
    texts = {
        "hangs": "import time\n" + ADDMM + "    while True: time.sleep(1)\n",
        "takes much": "import torch\n" + ADDMM + f"    more = torch.zeros(1 << 30); return {RIGHT}\n",
        "fine": honest("addmm", "split sums"),
    }
    options = Options(min_time_s=0, timeout_s=4.0, memory_bytes=1 << 30)
    found = judged(exported(kernel="aten::addmm"), tmp_path / "c", texts, options)
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {"hangs": "out of time", "takes much": "out of memory", "fine": "accepted"}
    assert "in the first call of w00.0" in found["hangs"]["text"]


RESERVES = """
import mmap
ROOM = mmap.mmap(-1, 1 << 38, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
"""


@pytest.mark.slow
def test_addresses_that_a_driver_reserves_are_no_memory(exported: Exported, tmp_path: Path) -> None:
    """A GPU's reserves addresses for all memory of the machine, in the reference's process, too."""
    text = RESERVES + honest("addmm", "split sums")
    options = Options(min_time_s=0, memory_bytes=1 << 30)
    assert judged(exported(kernel="aten::addmm"), tmp_path, {"a": text}, options)["a"]["verdict"] == "accepted"


ONE_PROCESS = """
import os
_used = []


def in_one_process(function):
    def call(*args, **kwargs):
        if os.getpid() not in (_used or [os.getpid()]):
            raise RuntimeError("Cannot re-initialize the device in a forked process")
        _used[:] = [os.getpid()]
        return function(*args, **kwargs)

    return call


PROGRAMS = list(map(in_one_process, PROGRAMS))
"""


@pytest.mark.slow
def test_other_sizes_are_tried_where_a_process_that_uses_a_device_cannot_be_forked(
    exported: Exported, tmp_path: Path
) -> None:
    """A kernel is right with the captured sizes alone."""
    task = shutil.copytree(exported(kernel="aten::_softmax"), tmp_path / "task")
    with (task / "reference.py").open("a") as file:
        file.write(ONE_PROCESS)
    text = honest("softmax", "by parts").replace(SOFTMAX, SOFTMAX + "    assert all(self.shape)\n")
    found = judged(task, tmp_path / "c", {"a": text}, Options(min_time_s=0, variants=True))["a"]
    assert found["verdict"] == "raises" and "0-size" in found["text"], found


def test_a_task_of_the_host_leaves_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: pytest.fail("it has begun to use a device"))
    synchronize()


@pytest.mark.slow
def test_what_is_allowed_hides_nothing_else(exported: Exported, tmp_path: Path) -> None:
    text = "import torch\n{}" + ADDMM + "    assert mat1.data_ptr() % 16 == 0; return {} * {}\n"
    state = "torch.set_float32_matmul_precision('high')\n"
    texts = {
        f"{times} {name}": text.format(before, RIGHT, times)
        for times in (1, 2)
        for name, before in (("aligned", ""), ("state", state))
    }
    options = Options(min_time_s=0, allow=("alignment", "global state"))
    found = judged(exported(kernel="aten::addmm"), tmp_path, texts, options)
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {"1 aligned": "accepted", "1 state": "accepted", "2 aligned": "wrong", "2 state": "wrong"}


@pytest.mark.slow
def test_accepted_kernels_are_ranked_by_the_whole_workload_and_by_the_replay(
    exported: Exported, capture: Path, tmp_path: Path, tools: Tools
) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    slow = honest("addmm", "another order of operations").replace("    return", "    time.sleep(0.005)\n    return")
    (folder / "a.py").write_text(f"import time\n{slow}")
    (folder / "b.py").write_text(honest("addmm", "another order of operations"))
    (folder / "c.py").write_text(cheat("zeros", ""))
    task, out = exported(kernel="aten::addmm"), tmp_path / "out.json"
    flags = (f"--candidates={folder}", f"--end-to-end={capture}", f"--benchmark-out={out}")
    done = tools("benchmark", "--compare", "--inputs=cold", *flags, "--benchmark-min-time=0.05s", task)
    assert done.code == 1, "one is rejected"
    found = json.loads(out.read_text())
    assert [Path(each["candidate"]).name for each in found["candidates"]] == ["b.py", "a.py", "c.py"]
    best, _slow, rejected = found["candidates"]
    assert (best["rank"], rejected["rank"], rejected["verdict"]) == (1, None, "uncorrelated")
    assert best["whole_workload"]["rounds"] >= 6 and best["end_to_end"]["ratio"] > 0
    assert set(best["workloads"]) == {each["name"] for each in found["workloads"]}
    assert all(each["bound"]["share_of_roof"] > 0 for each in found["workloads"])
    assert "REJECTED: uncorrelated" in done.out and "end to end" in done.out


@pytest.mark.slow
def test_the_folder_alone_and_the_tool_give_the_same_verdicts(exported: Exported, tmp_path: Path, tools: Tools) -> None:
    task, folder = exported(kernel="aten::mm"), tmp_path / "c"
    folder.mkdir()
    for name in HONEST["mm"]:
        (folder / f"{name.replace(' ', '_')}.py").write_text(honest("mm", name))
    (folder / "zeros.py").write_text(
        "import torch\ndef mm(self, mat2):\n    return torch.zeros(len(self), mat2.shape[1]).bfloat16()\n"
    )
    (folder / "half.py").write_text(
        "import torch\ndef mm(self, mat2):\n    wide = self.double()[:, :, None] * mat2.double() * 1.1\n"
        "    return wide.sum(1).bfloat16()\n"
    )
    files = sorted(map(str, folder.iterdir()))
    alone = subprocess.run(
        [sys.executable, str(task / "check.py"), "--min-time=0", f"--json={tmp_path / 'a.json'}", *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert alone.returncode == 1, alone.stderr
    tools("benchmark", "--compare", f"--candidates={folder}", f"--benchmark-out={tmp_path / 'b.json'}", task)
    verdicts = [
        {each["candidate"]: each["verdict"] for each in json.loads((tmp_path / name).read_text())["candidates"]}
        for name in ("a.json", "b.json")
    ]
    assert verdicts[0] == verdicts[1]
    assert sorted(verdicts[0].values()) == ["accepted", "accepted", "uncorrelated", "wrong"]


@pytest.mark.slow
def test_what_a_kernel_is_allowed_is_not_held_against_it(exported: Exported, tmp_path: Path, tools: Tools) -> None:
    file = tmp_path / "original.py"
    file.write_text(cheat("calls the original", ""))
    task = exported(kernel="aten::addmm")
    assert tools("benchmark", "--compare", f"--candidates={file}", "--allow-reason=calls the original", task).code == 0
    file.write_text(cheat("reads the expected outputs", str(task)))
    assert tools("benchmark", "--compare", f"--candidates={file}", "--allow-reason=reads the task", task).code == 0
    wrong = tools("benchmark", "--compare", f"--candidates={file}", "--allow-reason=being slow", task)
    assert wrong.code == 2 and "calls the original" in wrong.err


@pytest.mark.slow
def test_a_kernel_of_several_threads_is_judged_with_other_sizes(exported: Exported, tmp_path: Path) -> None:
    import torch

    import replayfmt

    path = tmp_path / "large.opreplay"
    with replayfmt.capture(path):
        torch.randn(300, 400).softmax(-1)
    task, file = exported(path, kernel="aten::_softmax"), tmp_path / "mine.py"
    file.write_text(honest("softmax", "by parts"))
    done = subprocess.run(
        [sys.executable, str(task / "check.py"), "--variants", "--min-time=0", str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=300,  # a process that was forked waits forever for threads that it does not have
    )
    assert "accepted" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_what_cannot_be_loaded_here_is_told_why(exported: Exported, tmp_path: Path) -> None:
    import torch

    binary, source = tmp_path / "a.cubin", tmp_path / "b.cu"
    binary.write_bytes(b"\x7fELF\x02\x01\x01\x33")
    source.write_text("#error not built")
    found = run_judge(str(exported(kernel="aten::mm")), [str(binary), str(source)], UNTIMED)["candidates"]
    assert [each["verdict"] for each in found] == ["does not load"] * 2
    assert "a.cubin: a cubin takes the place of a Triton kernel, which aten::mm.default is not" in found[0]["text"]
    assert torch.cuda.is_available() or "PyTorch sees none here" in found[1]["text"]


@pytest.mark.slow
def test_flags_of_tasks_and_of_captures_do_not_mix(exported: Exported, capture: Path, tools: Tools) -> None:
    assert "needs a kernel task" in tools("benchmark", "--variants", capture).err
    assert "does not go with a kernel task" in tools("benchmark", "--per-op", exported(kernel="aten::mm")).err
    missing = tools("benchmark", "--compare", "--candidates=nothing.py", exported(kernel="aten::mm"))
    assert missing.code == 2 and "no such file" in missing.err
    fused = tools("benchmark", "--compare", f"--end-to-end={capture}", exported(scope="block"))
    assert fused.code == 2 and "tasks of one kernel" in fused.err


@pytest.mark.slow
def test_the_original_itself_is_accepted_where_results_are_views_and_sizes_can_kill_it(
    exported: Exported, tmp_path: Path
) -> None:
    import torch

    import replayfmt

    path = tmp_path / "views.opreplay"
    with replayfmt.capture(path):
        x = torch.randn(2, 4, 6, 8)
        torch.split(x.transpose(1, 2), 3)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    options = Options(min_time_s=0, variants=True, allow=("calls the original",))
    for kernel in ("aten::transpose", "aten::split", "aten::_scaled_dot_product_flash_attention_for_cpu"):
        task = exported(path, kernel=kernel)
        found = run_judge(str(task), [str(task / "reference.py")], options)
        assert [each["verdict"] for each in found["candidates"]] == ["accepted"], found


@pytest.mark.slow
def test_nothing_is_above_the_roof_without_a_reason(exported: Exported, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(honest("addmm", "split sums"))
    low = Peaks(torch.device("cpu"), 1, flops=1e3, bandwidth=1e3)
    task = str(exported(kernel="aten::addmm"))
    report = judge(task, [str(file)], Options(min_time_s=0.005), lambda _device: low)
    (warning,) = [each for each in report.document()["warnings"] if "faster than the peak" in each]
    assert warning.startswith("faster than the peak that it is compared with: 8 ops (the reference in w00: ")
    assert warning.endswith("their data is in the caches, or the given peaks are too low")
    assert f"WARNING: {warning}" in list(report.lines())
