"""What the tests of compiled regions share: one cache of what Inductor compiled, and what its generated code says."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_thread import one_thread as one_thread

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.native.building import NotAvailable, compiler
from replayfmt.replay.plan import Plan

_CALL = re.compile(
    r"^ +(?:\w+ = )?"
    r"(?P<callee>(?:cpp_\w*|extern_kernels\.\w+|(?:torch\.ops\.)?aten\.\w+(?:\.\w+)?|empty_strided_cpu))\("
)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all workers. Without threads of its own Inductor starts no processes."""
    try:
        compiler()
    except NotAvailable as problem:
        pytest.skip(f"Inductor needs a C++ compiler ({problem})")
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Captured:
    """A capture, what the program returned, and the texts of the regions that it called, in order."""

    def __init__(self, path: Path, returned: Any, regions: list[str]) -> None:
        self.path, self.returned, self.regions = path, returned, regions

    def kernels(self) -> list[str]:
        """The kernels of the ops, without namespace and overload."""
        with open_capture(self.path) as reader:
            ops = [record for record in reader.records() if record.kind is RecordKind.op]
            names = [reader.kernels[op.signature.kernel].name for op in ops]
        return [name.partition("::")[2] for name in names]

    def written_calls(self) -> list[str]:
        """The same, for what the generated code says that it calls."""
        found = []
        for text in self.regions:
            body = text[text.index("def call(self, args)") : text.index("runner = Runner")]
            for line in body.splitlines():
                match = _CALL.match(line)
                if match is not None:
                    name = match["callee"]
                    for prefix in ("torch.ops.", "extern_kernels.", "aten."):
                        name = name.removeprefix(prefix)
                    name = name.partition(".")[0]
                    found.append("empty_strided" if name == "empty_strided_cpu" else name)
        return found

    def unsupported(self) -> list[dict[str, Any]]:
        with open_capture(self.path) as reader:
            return [
                {node.name: node.constant for node in record.signature.args}
                for record in reader.records()
                if record.kind is RecordKind.unsupported
            ]

    def replays(self) -> None:
        """Bit for bit, with something to compare."""
        with Plan(self.path, allow_code=True) as plan:
            result = plan.execute(verify="bitwise")
        assert result.outcome == "ok", str(result.divergence)
        assert result.verification.digests > 0


Capture = Callable[..., Captured]


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Captures what a function does, with the kernels of compiled regions. What it returns lives until the end."""
    from torch._inductor.output_code import CompiledFxGraph

    called: list[str] = []
    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        called.append(self.source_code)
        return original(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", call)
    made = 0

    def make(program: Callable[[], Any], **options: Any) -> Captured:
        nonlocal made
        made += 1
        path = tmp_path / f"{made}.opreplay"
        called.clear()
        with replayfmt.capture(path, **options):
            returned = program()
        return Captured(path, returned, list(called))

    return make
