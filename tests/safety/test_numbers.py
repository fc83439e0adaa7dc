"""Numbers of a capture: lengths, offsets, sizes and ids of any size give one clear error, never a wild access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failure.table import recorded
from format.reseal import change_tables
from in_process import Tools
from replay.rewriting import rewrite

from replayfmt.errors import InvalidCapture, OpReplayError, ReplayFailed, ReplayRefused
from replayfmt.format.codes import RecordKind
from replayfmt.format.model import Record, TensorMeta
from replayfmt.format.reader import open_capture
from replayfmt.replay.plan import Plan

from .programs import indices_and_missing_arguments, layouts, random_numbers_and_lists, together, views_and_resizes

EXTREMES = (-1, 0, 2**40, 2**62, -(2**63), 2**63 - 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    program = together(views_and_resizes, indices_and_missing_arguments, random_numbers_and_lists, layouts)
    return recorded(tmp_path, lambda: program(tmp_path), "source", digests="ops")


def _tried(path: Path) -> list[OpReplayError | str]:
    """What a strict and a lenient replay of a capture come to; nothing but errors of ours may get out."""
    found: list[OpReplayError | str] = []
    for keep_going in (False, True):
        try:
            with Plan(path, keep_going=keep_going) as plan:
                found.append(plan.execute(verify="auto", keep_going=keep_going).outcome)
        except OpReplayError as error:
            assert len(str(error)) < 2000
            found.append(error)
    return found


@pytest.mark.guarantee("memory-claims")
@pytest.mark.parametrize("length", [2**36, 2**44, 2**60])
def test_a_capture_that_claims_more_memory_than_there_is_is_refused(
    source: Path, tmp_path: Path, tools: Tools, length: int
) -> None:
    path = rewrite(source, tmp_path / "bomb.opreplay", storage_bytes=length)
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    (finding,) = refused.value.findings
    assert "bytes of tensors are alive at once; this machine has" in finding
    for command in (("run",), ("benchmark", "--benchmark-min-time=1x"), ("run", "--keep-going")):
        done = tools(*command, path)
        assert done.code in (1, 3) and len(done.err.splitlines()) <= 2, done
    assert tools("dump", "--summary", path).code == 0


def test_a_length_beyond_what_the_format_allows_is_no_valid_capture(source: Path, tmp_path: Path) -> None:
    path = rewrite(source, tmp_path / "bomb.opreplay", storage_bytes=2**63 - 1)
    with pytest.raises(InvalidCapture, match="storage_bytes holds 9223372036854775807"):
        Plan(path)


@pytest.mark.guarantee("views")
@pytest.mark.parametrize(
    "change",
    [{"tensor_offset": 2**20}, {"tensor_offset": 2**58}, {"storage_bytes": 0}],
    ids=["far", "farther", "nothing there"],
)
def test_a_view_beyond_its_storage_is_never_made(source: Path, tmp_path: Path, change: dict[str, int]) -> None:
    """PyTorch would make the storage longer instead of complaining."""
    path = rewrite(source, tmp_path / "outside.opreplay", **change)  # type: ignore[arg-type]
    outside = pytest.raises(ReplayFailed, match="a tensor needs .* bytes of a storage that has")
    with Plan(path) as plan, outside as failed:
        plan.execute()
    assert "ordinal 2 (aten::mul.Tensor" in str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((2**40,), (0,)), ((17,), (1,)), ((16,), (2**40,)), ((5,), (4,)), ((2, 3), (5, 8))],
    ids=range(5),
)
def test_sizes_and_strides_that_do_not_fit_fail_or_differ(
    source: Path, tmp_path: Path, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    def change(meta: TensorMeta) -> TensorMeta:
        return replace(meta, sizes=sizes, strides=strides) if meta.sizes == (16,) else meta

    for outcome in _tried(rewrite(source, tmp_path / "shapes.opreplay", meta=change)):
        assert outcome not in ("ok",), "what it claims is not what the capture's ops give"


@pytest.mark.guarantee("views")
@pytest.mark.parametrize(
    ("column", "value"), [("meta_sizes", -1), ("meta_sizes", 2**62), ("meta_strides", -8), ("meta_strides", 2**62)]
)
def test_impossible_sizes_and_strides_are_found_when_the_file_is_read(source: Path, column: str, value: int) -> None:
    def edit(tables: tuple[Any, dict[str, np.ndarray], Any]) -> None:
        name = next(each for each in tables[1] if each.endswith(column.removeprefix("meta_")))
        tables[1][name] = np.full_like(tables[1][name], value)

    change_tables(source, edit)
    with pytest.raises(InvalidCapture):
        with open_capture(source) as reader:
            list(reader.records())
        Plan(source)


@pytest.mark.guarantee("numbers")
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in RecordKind if kind not in (RecordKind.scope_begin,)], ids=lambda kind: kind.name
)
def test_integers_of_any_size_in_a_record_are_one_clear_error(source: Path, tmp_path: Path, kind: RecordKind) -> None:
    """Ids, versions, lengths, shapes, indices: each record's integers, all at once and one at a time."""
    with open_capture(source) as reader:
        widest = max((len(record.args) for record in reader.records() if record.kind is kind), default=0)
    if not widest:
        return
    for value in EXTREMES:
        for only in (None, 0):

            def change(
                record: Record, ints: list[int], _floats: list[float], at: int | None = only, to: int = value
            ) -> None:
                if record.kind is kind:
                    for place in range(len(ints)) if at is None else range(min(1, len(ints))):
                        ints[place] = to

            path = tmp_path / "extreme.opreplay"
            try:
                rewrite(source, path, change=change)
            except ValueError:  # the writer itself refuses it
                path.with_name(path.name + ".partial").unlink(missing_ok=True)
                continue
            _tried(path)
            path.unlink()


@pytest.mark.guarantee("settings")
@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"\xff" * len(content),
        lambda content: content[:100],
        lambda content: content * 3,
        lambda content: b"",
    ],
    ids=["nonsense", "short", "long", "empty"],
)
def test_a_generators_state_is_checked_by_the_generator(
    source: Path, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    before = torch.get_rng_state()
    path = rewrite(
        source,
        tmp_path / "state.opreplay",
        payload=lambda _number, content: change(content) if len(content) > 4000 else content,
    )
    with Plan(path) as plan, pytest.raises(ReplayFailed, match="generator_state.* failed: RuntimeError"):
        plan.execute()
    assert torch.equal(torch.get_rng_state(), before)


def test_payloads_that_are_shorter_than_their_storage_are_no_valid_capture(source: Path, tmp_path: Path) -> None:
    path = rewrite(source, tmp_path / "short.opreplay", payload=lambda _number, content: content[: len(content) // 2])
    with pytest.raises(InvalidCapture, match="storage 1 has 64 bytes, its payload 1 has 32"), Plan(path) as plan:
        plan.execute()
