"""Ranges and scopes of real programs, trimmed: they replay by themselves, from the inputs they had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.format.codes import RecordKind, StorageOrigin
from replayfmt.format.reader import open_capture
from replayfmt.format.signature_text import signature_text
from replayfmt.replay.plan import Plan
from replayfmt.trim.trimming import checked_here, trim_capture

from .conftest import Captured
from .trimmed import compare, digest_hexes, ops, trim


def views_and_writes_in_place() -> None:
    x = torch.arange(24.0)
    y = x.view(4, 6)
    z = y.t()
    z.add_(1)
    y[1] = 7
    x[3:9].mul_(2)
    torch.as_strided(x, (3, 3), (2, 1)).sum()
    x.data[0] = 5
    y.sum().item()


def training_with_an_optimizer() -> None:
    layer = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(3):
        F.dropout(layer(torch.randn(3, 6)), 0.5).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def autocast_and_settings() -> None:
    a = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = a @ a
    torch.set_default_dtype(torch.float64)
    c = torch.ones(3) + 1
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        d = torch.ones(3) + 1
    (b.float().sum() + c.sum() + d.sum()).item()


def composites() -> None:
    dense = torch.eye(4)
    sparse = dense.to_sparse()
    torch.sparse.mm(sparse, torch.randn(4, 2)).sum()
    csr = dense.to_sparse_csr()
    (csr @ torch.randn(4, 3)).sum()
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 2, torch.qint8)
    quantized.dequantize().sum()


def resized_and_partly_written() -> None:
    x = torch.randn(5)
    storage = x.untyped_storage()
    storage.resize_(100)
    x.fill_(2)
    cache = torch.empty(4, 8)
    cache[:, 2:5] = 1
    (cache[:, 2:5] * 2).sum()
    out = torch.empty(0)
    torch.add(x, x, out=out)
    out.sum().item()
    storage.resize_(0)


def written_from_outside() -> None:
    shared = np.ones(6, np.float32)
    x = torch.from_numpy(shared)
    y = x * 2
    shared[:] = 3
    (x + y).sum().item()
    shared[:] = 4
    (x - y).sum().item()


def ops_that_raise_and_lists() -> None:
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(RuntimeError):
        a @ b
    parts = list(torch.ones(6).split(2))
    torch._foreach_add_(parts, 1.0)
    a.unbind(1)[2].add_(1)
    torch.complex(a, b).conj().mul(2).real.sum().item()


def seeded_again_and_own_generators() -> None:
    own = torch.Generator().manual_seed(7)
    a = torch.randn(3, generator=own)
    torch.manual_seed(5)
    b = torch.randn(3) + torch.rand(3, generator=own)
    torch.nn.init.normal_(b)
    torch.bernoulli(torch.full((4,), 0.5)).sum().item()
    (a + b).sum().item()


def several_threads() -> None:
    with replayfmt.scope("main"):
        x = torch.ones(4)

        def work() -> None:
            with replayfmt.scope("worker"):
                x.mul(2).sum()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        layer = torch.nn.Linear(4, 2)
        layer(x).sum().backward()


PROGRAMS = (
    views_and_writes_in_place,
    training_with_an_optimizer,
    autocast_and_settings,
    composites,
    resized_and_partly_written,
    written_from_outside,
    ops_that_raise_and_lists,
    seeded_again_and_own_generators,
    several_threads,
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_third_of_a_program_replays_from_the_inputs_it_had(
    program: Callable[[], Any], captured: Captured, tmp_path: Path
) -> None:
    path = captured(program)
    with open_capture(path) as reader:
        count, all_ops = reader.record_count, len(ops(reader))
    total = 0
    for part in range(3):
        start, stop = count * part // 3, count * (part + 1) // 3
        out = tmp_path / f"part{part}.opreplay"
        with open_capture(path) as reader:
            if not any(record.kind is RecordKind.op for record in reader.records(start, stop)):
                continue
        result = trim(path, out, ops=f"{start}:{stop}")
        assert result.verified.startswith(("bitwise", "not verified: the capture holds nothing to compare with"))
        assert result.checked.startswith("bitwise")
        # What lies beyond the end of a storage that the program made longer was never written.
        total += compare(path, out, content=program is not resized_and_partly_written)
    assert total == all_ops


def test_a_scope_that_is_entered_several_times_keeps_what_changed_between(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        x, y = torch.ones(4), torch.ones(4)
        for step in range(3):
            with replayfmt.scope("train"), replayfmt.scope("forward"):
                x.add_(y)
            with replayfmt.scope("update"):
                y.mul_(2)
            torch.set_default_dtype(torch.float64 if step == 1 else torch.float32)
        torch.set_default_dtype(torch.float32)

    path = captured(program)
    out = tmp_path / "out.opreplay"
    trim(path, out, scope="train/forward")
    assert compare(path, out) == 3
    with open_capture(out) as reader:
        text = [
            (record.kind.name, reader.scope_path(record.scope))
            for record in reader.records()
            if record.kind in (RecordKind.scope_begin, RecordKind.scope_end)
        ]
        one_pass = [
            ("scope_begin", "train"),
            ("scope_begin", "train/forward"),
            ("scope_end", "train/forward"),
            ("scope_end", "train"),
        ]
        assert text == one_pass * 3
        imports = [record for record in reader.records() if record.kind is RecordKind.storage_import]
        assert [record.argument("version") for record in imports] == [0, 0, 1, 2], "y was changed in between, x was not"
        assert [record.argument("reason") for record in imports[2:]] == ["outside_write"] * 2


def test_a_kernel_is_kept_with_its_inputs_and_nothing_else(captured: Captured, tmp_path: Path) -> None:
    path = captured(training_with_an_optimizer)
    out = tmp_path / "out.opreplay"
    result = trim(path, out, kernel="aten::addmm")
    assert compare(path, out) == result.ops == 3
    with open_capture(out) as reader:
        assert {kernel.qualified_name for kernel in reader.kernels[1:]} == {"aten::addmm.default"}
        # Three steps take weight, bias and a batch each; the parameters are others in each.
        assert reader.storage_count == 2 + 3 + 3
        origins = [reader.storage(number).origin for number in range(1, 9)]
        assert (origins.count(StorageOrigin.payload), origins.count(StorageOrigin.op)) == (5, 3)


@pytest.mark.slow
def test_a_trimmed_capture_can_be_trimmed_again_and_names_the_first(captured: Captured, tmp_path: Path) -> None:
    path = captured(training_with_an_optimizer)
    once, twice = tmp_path / "once.opreplay", tmp_path / "twice.opreplay"
    with open_capture(path) as reader:
        third = reader.record_count // 3
        session = reader.session.session_id
    trim(path, once, ops=f"{third}:")
    with open_capture(once) as reader:
        middle = reader.record_count // 2
    trim(once, twice, ops=f"{middle}:")
    assert compare(path, twice) > 3
    with open_capture(twice) as reader:
        assert reader.session.policies["trimmed-from"] == session
        assert reader.session.policies["trimmed-selection"] == f"--ops={third}:; --ops={middle}:"
        assert reader.session.session_id != session


@pytest.mark.slow
def test_digests_are_those_of_a_capture_that_digests_every_op(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(3)
        training_with_an_optimizer()
        resized_and_partly_written()

    plain, thorough = captured(program, "plain"), captured(program, "thorough", digests="ops")
    expected = digest_hexes(thorough)
    for path, name in ((plain, "a"), (thorough, "b")):
        out = tmp_path / f"{name}.opreplay"
        trim(path, out, ops="20:")
        with open_capture(out) as reader, open_capture(path) as original, open_capture(thorough) as every:
            ordinals = {
                record.ordinal: record.annotation["captured_ordinal"] for record in ops(reader) if record.annotation
            }
            place = {record.ordinal: index for index, record in enumerate(ops(original))}
            in_thorough = [record.ordinal for record in ops(every)]
            got = {in_thorough[place[ordinals[of]]]: hexes for of, hexes in digest_hexes(out).items() if of >= 0}
        assert {of: set(hexes) for of, hexes in got.items()} == {
            of: set(hexes) for of, hexes in expected.items() if of >= min(got)
        }


def test_what_was_already_digested_is_not_digested_twice(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(views_and_writes_in_place, digests="ops"), tmp_path / "out.opreplay"
    with open_capture(path) as reader:
        first = ops(reader)[0].ordinal
        digests = sum(record.kind is RecordKind.digest for record in reader.records(first))
    result = trim(path, out, ops=f"{first}:")
    assert result.digests == 0
    with open_capture(out) as reader:
        assert reader.summary.records[RecordKind.digest] == digests


def test_only_live_storages_are_embedded_and_never_more_than_predicted(captured: Captured, tmp_path: Path) -> None:
    predictions = []

    def program() -> None:
        dead, used = torch.ones(100_000), torch.ones(1000)
        dead.add_(1)
        used.add_(1)
        del dead
        with replayfmt.scope("kept"):
            used * 2

    path, out = captured(program), tmp_path / "out.opreplay"
    with Plan(path, keep_going=True) as plan:
        result = trim_capture(
            plan, str(out), OpSelection(scope="kept"), checked_here(Plan), on_prediction=predictions.append
        )
    assert result.embedded_bytes == predictions[0].embedded_bytes == 4000
    assert out.stat().st_size < 20_000
    with open_capture(out) as reader:
        assert reader.storage_count == 2


@pytest.mark.slow
def test_a_signature_keeps_the_calls_that_are_alike(captured: Captured, tmp_path: Path) -> None:
    path, out = captured(training_with_an_optimizer), tmp_path / "out.opreplay"
    with open_capture(path) as reader:
        texts = [signature_text(record, reader) for record in ops(reader)]
    text = next(each for each in texts if each.startswith("aten::addmm"))
    result = trim(path, out, signature=text)
    assert result.ops == texts.count(text) == 3
    assert compare(path, out) == 3
    trim(path, out, signature=text, ops=f"{len(texts) // 2}:", force=True)
    with open_capture(out) as reader:
        assert 1 <= len(ops(reader)) < 3, "of both selections, what both select"


@pytest.mark.slow
def test_storages_that_died_among_what_is_left_out_die_in_the_result_too(captured: Captured, tmp_path: Path) -> None:
    def program() -> None:
        for _ in range(200):
            x = torch.ones(1000).add(1)
            x.mul(2)

    path, out = captured(program), tmp_path / "out.opreplay"
    trim(path, out, kernel="aten::mul")
    compare(path, out, content=False)
    with open_capture(out) as reader:
        released = [record.ordinal for record in reader.records() if record.kind is RecordKind.storage_release]
        assert len(released) > 300 and min(released) < reader.record_count // 2
        assert reader.storage_count == 400


def test_content_that_the_first_op_overwrites_without_reading_it_is_left_out(
    captured: Captured, tmp_path: Path
) -> None:
    def program() -> None:
        whole, part, turned, other = (torch.randn(100, 100) for _ in range(4))
        other.copy_(part)
        other[1:].copy_(part[:-1])
        whole.fill_(3.0)
        part[:, 1:].fill_(4.0)
        turned.t().fill_(5.0)

    path = captured(program)
    # What is needed: the source of the copies (their target is overwritten), and what is filled in part alone.
    for kernel in ("aten::copy_", "aten::fill_"):
        out = tmp_path / f"{kernel[6:]}.opreplay"
        result = trim(path, out, kernel=kernel)
        assert result.checked.startswith("bitwise") and result.digests
        # Random numbers take all their room in the file, what is left out next to none.
        assert 30_000 < out.stat().st_size < 2 * 30_000
        compare(path, out, content=False)
