"""Results with addresses, or bytes that nobody defines, are never embedded: the ops that give them are kept, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Ran, Tools

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan
from replayfmt.trim.script import script_with_data

from .conftest import Captured
from .trimmed import compare, trim

# A library whose scheduler gives records with addresses in them, and whose kernel follows those.
LIBRARY = """
import ctypes
import torch

library = torch.library.Library("opaquetrim", "FRAGMENT")
library.define("schedule(Tensor x) -> Tensor")
library.define("advance(Tensor(a!) record) -> ()")
library.define("attend(Tensor record, Tensor x) -> Tensor")
library.define("hidden(Tensor x) -> Tensor")

def schedule(x):
    record = torch.empty(64, dtype=torch.int8)
    record.view(torch.int64)[:2] = torch.tensor([record.data_ptr() + 8, x.numel()])
    return record

def advance(record):
    record.view(torch.int64)[1] += 1

def attend(record, x):
    address = int(record.view(torch.int64)[0])
    return x * ctypes.c_int64.from_address(address).value

CONSTANT = ctypes.c_int64(3)        # lives as long as the process, at an address of its own

def hidden(x):
    return torch.tensor([ctypes.addressof(CONSTANT)])

for name, function in (("schedule", schedule), ("advance", advance), ("attend", attend), ("hidden", hidden)):
    library.impl(name, function, "CompositeExplicitAutograd")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("library")
    (folder / "opaque_trim_library.py").write_text(LIBRARY)
    sys.path.insert(0, str(folder))
    try:
        import opaque_trim_library  # type: ignore[import-not-found]

        yield "opaque_trim_library"
        opaque_trim_library.library._destroy()
        del sys.modules["opaque_trim_library"]  # a worker may come back to this module
    finally:
        sys.path.remove(str(folder))


def attention() -> torch.Tensor:
    x = torch.ones(3)
    record = torch.ops.opaquetrim.schedule(x)
    x.add_(1)
    torch.ops.opaquetrim.advance(record)
    with replayfmt.scope("kept"):
        return torch.ops.opaquetrim.attend(record, x.exp()).sum()


def names(path: Path) -> list[str]:
    with open_capture(path) as reader:
        return [
            reader.kernels[record.signature.kernel].name.partition("::")[2]
            for record in reader.records()
            if record.kind is RecordKind.op
        ]


@pytest.mark.parametrize("digests", ["live", "ops"])
def test_ops_that_give_addresses_are_kept_with_all_that_write_them(
    captured: Captured, tmp_path: Path, library: str, digests: str
) -> None:
    path, out = captured(attention, digests=digests), tmp_path / "out.opreplay"
    result = trim(path, out, scope="kept")
    assert names(out) == ["schedule", "advance", "exp", "attend", "sum"]
    assert any("kept besides the 3 selected ops: 2, whose results hold" in note for note in result.notes)
    with open_capture(out) as reader:
        assert reader.session.policies["opaque-results"] == "opaquetrim::schedule.default:0"
    with Plan(out) as plan:
        replayed = plan.execute(verify="bitwise")
        assert replayed.outcome == "ok" and replayed.verification.digests
        assert [each.op for each in replayed.opaque_results] == ["opaquetrim::schedule.default"]


def test_undefined_bytes_are_not_embedded_either(captured: Captured, tmp_path: Path) -> None:
    def program() -> Any:
        probabilities = torch.randn(12, 3, 6).log_softmax(2)
        targets, lengths = torch.randint(1, 6, (3, 5)), ([12, 9, 7], [5, 2, 3])
        loss, table = torch._ctc_loss(probabilities, targets, *lengths)
        with replayfmt.scope("kept"):
            return torch.ops.aten._ctc_loss_backward(torch.ones(3), probabilities, targets, *lengths, loss, table, 0)

    path, out = captured(program), tmp_path / "out.opreplay"
    trim(path, out, scope="kept")
    assert names(out) == ["_ctc_loss", "ones", "_ctc_loss_backward"]
    compare(path, out, content=False)  # the table has other bytes each time


def test_a_script_with_data_gives_such_bytes_again_as_well(captured: Captured, tmp_path: Path) -> None:
    def program() -> torch.Tensor:
        loss, table = torch._ctc_loss(
            torch.randn(12, 3, 6).log_softmax(2), torch.randint(1, 6, (3, 5)), [12, 9, 7], [5, 2, 3]
        )
        with replayfmt.scope("kept"):
            return table.exp() + loss.sum()

    script, data = tmp_path / "script.py", tmp_path / "data.safetensors"
    with Plan(captured(program), keep_going=True) as plan:
        result = script_with_data(plan, str(script), str(data), OpSelection(scope="kept"))
    assert result.ops == 4 and "_ctc_loss" in script.read_text()


@pytest.mark.slow
def test_a_replay_that_ends_its_process_is_a_finding(
    captured: Captured, tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch, tools: Tools
) -> None:
    """An address that is the same whenever the op runs in this process, so that running it twice shows nothing."""

    def program() -> None:
        record = torch.ops.opaquetrim.hidden(torch.ones(3)).view(torch.int8)
        with replayfmt.scope("kept"):
            torch.ops.opaquetrim.attend(record, torch.ones(2))

    path, out = captured(program, digests="none"), tmp_path / "out.opreplay"

    def run(*flags: str) -> Ran:
        return tools("trim", "--scope=kept", f"--allow-import={library}", *flags, path, out)

    monkeypatch.setenv("PYTHONFAULTHANDLER", "")
    code, _text, err = run()
    assert code == 1 and "was killed by SIGSEGV" in err and "--opaque-result" in err
    assert not out.exists() and not list(tmp_path.glob("*.partial*"))
    code, text, err = run("--opaque-result=opaquetrim::hidden")
    assert (code, err) == (0, ""), err
    assert names(out)[0] == "hidden" and "checked   bitwise" in text
