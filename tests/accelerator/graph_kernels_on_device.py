"""Triton kernels inside of graphs, tried on the simulated accelerator with Triton's interpreter. Run by
test_accelerator.py in a process of its own.

The interpreter runs a kernel when it is launched; a launch into a graph has to run at each replay. So a launch while a
graph is captured becomes work of that graph here, beneath the recorder's hook.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from graphs_on_device import DEVICE, body_of, graph_of, graphs_in
from in_process import Tools, tools  # noqa: F401 - a fixture

import replayfmt
from replayfmt import Plan
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import BODY, contents_of
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
sim = register()


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * FACTOR, mask=at < n)


_SAME_BY_ANOTHER_WAY = """
import triton
import triton.language as tl

@triton.jit
def scale_kernel(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, FACTOR * tl.load(x + at, mask=at < n), mask=at < n)
"""


@pytest.fixture(autouse=True)
def launches_are_work_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(scale_kernel)
    original = kind.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not sim.is_capturing():
            return original(kernel, *args, **kwargs)
        given = [sim.same_address(each) if isinstance(each, torch.Tensor) else each for each in args]
        used = [each for each in given if isinstance(each, torch.Tensor)]
        sim.add_work(functools.partial(original, kernel, *given, **kwargs), used)
        return None

    monkeypatch.setattr(kind, "run", run)


def scaling() -> list[list[float]]:
    """A graph of operators and a Triton kernel between them."""
    x, out = torch.arange(6.0).to(DEVICE), torch.zeros(6).to(DEVICE)

    def issue() -> torch.Tensor:
        y = x + 1
        scale_kernel[(2,)](y, out, 6, FACTOR=3, BLOCK=4)
        return out * 2

    graph, result = graph_of(issue)
    seen = []
    for number in range(2):
        x.fill_(float(number))
        graph.replay()
        seen.append(result.tolist())
    return seen


def captured(path: Path, **options: Any) -> Path:
    expected = scaling()
    assert expected == [[6] * 6, [12] * 6]
    with replayfmt.capture(path, **options), replayfmt.scope("execute"):
        assert scaling() == expected
    return path


def test_a_triton_kernel_in_a_graph_is_code_of_its_body_and_runs_with_leave(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = captured(tmp_path / "a.opreplay")
    assert not open_capture(path).summary.unsupported
    names = [name.partition(".")[0] for name in body_of(path)]
    assert names == ["aten::add", "triton::scale_kernel", "aten::mul"]
    with pytest.raises(ReplayRefused) as refused, Plan(path, ["cpu"]):
        pass
    said = "".join(refused.value.findings)
    assert "graph::captured_1" in said and "runs only with --allow-code" in said
    assert "if you trust whoever made it" in str(refused.value), "the advice is given for code inside of graphs, too"
    done = tools("run", "--verify=bitwise", "--allow-code", "--device=cpu", path)
    assert done.code == 0, done.err
    # What the interpreter cannot run is refused, with the kernel and the graph.
    with pytest.raises(ReplayRefused) as refused, Plan(path, allow_code=True):
        pass
    assert "graph::captured_1" in "".join(refused.value.findings) and "TRITON_INTERPRET=0" in "".join(
        refused.value.findings
    )


def test_the_body_is_a_capture_that_the_tools_open(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = captured(tmp_path / "a.opreplay")
    reader = open_capture(path)
    (kernel,) = graphs_in(path)
    number = next(n for n in kernel.attachments if reader.attachments[n].role == BODY)  # type: ignore[union-attr]
    body = tmp_path / "body.opreplay"
    done = tools("dump", f"--attachment={number}", "-o", body, path)
    assert done.code == 0 and body.read_bytes() == contents_of(reader, kernel)[BODY], done.err
    assert tools("check", body).code == 0
    text = tools("dump", body).out
    assert "triton::scale_kernel" in text and "aten::mul" in text
    done = tools("run", "--allow-code", "--device=cpu", body)
    assert done.code == 0 and "the content of 2 storages was synthesized" in done.out, done.err
    new = tmp_path / "new.py"
    new.write_text(_SAME_BY_ANOTHER_WAY)
    done = tools(
        "run",
        "--allow-code",
        "--device=cpu",
        f"--replay-kernel-substitution=triton::scale_kernel@triton={new}:scale_kernel",
        body,
    )
    assert done.code == 0 and "1 call, values equal" in done.out, done.err
    done = tools(
        "run",
        "--allow-code",
        "--device=cpu",
        f"--replay-kernel-substitution=triton::scale_kernel@triton={new}:scale_kernel",
        path,
    )
    assert done.code == 2 and "is called only inside graph::captured_1: opreplay-dump --attachment=ID" in done.err
    assert tools("trim", "--allow-code", f"--script={tmp_path / 'c.py'}", "--kernel=triton::*", body).code == 0
    assert "tl.load" in (tmp_path / "c.py").read_text()
    done = tools(
        "benchmark",
        "--per-op",
        "--kernel=triton::*",
        "--allow-code",
        "--device=cpu",
        "--benchmark-min-time=1x",
        "--benchmark-format=json",
        body,
    )
    assert done.code == 0 and "triton::scale_kernel" in done.out, done.err


def test_selections_of_what_graphs_alone_call_say_where_it_is(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path, given = captured(tmp_path / "a.opreplay"), tmp_path / "given.py"
    given.write_text("def scale_kernel(): pass\n")
    reader = open_capture(path)
    (kernel,) = graphs_in(path)
    number = next(n for n in kernel.attachments if reader.attachments[n].role == BODY)  # type: ignore[union-attr]
    where = f" called only inside of graph::captured_1 (its body: opreplay-dump --attachment={number})"
    for arguments in (
        ("dump", "--kernel=triton::scale*"),
        ("dump", "--kernel-skeleton=triton::scale_kernel"),
        ("trim", "--kernel=triton::scale_kernel", f"--script={tmp_path / 'script.py'}"),
        ("run", f"--replay-kernel-substitution=all={given}", "--device=cpu", "--allow-code"),
        ("benchmark", "--per-op", "--kernel=triton::scale_kernel", "--device=cpu", "--allow-code"),
    ):
        done = tools(*arguments, path)
        assert done.code == 2 and where in done.err, (arguments, done.err)
    assert where not in tools("dump", "--kernel=triton::another", path).err


def test_without_sources_a_body_with_one_is_left_out_and_a_replay_says_so(tmp_path: Path) -> None:
    path = captured(tmp_path / "a.opreplay", sources=False)
    with pytest.raises(ReplayRefused) as refused, Plan(path, ["cpu"], allow_code=True):
        pass
    assert "graph::captured_1" in "".join(refused.value.findings)
    assert b"tl.load" not in path.read_bytes()
    with open_capture(path) as reader:
        for kernel in reader.kernels:
            if kernel is not None and kernel.kind is KernelKind.graph and BODY in contents_of(reader, kernel):
                assert b"scale_kernel(x, out" not in contents_of(reader, kernel)[BODY]
