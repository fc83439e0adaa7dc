"""The dump of a capture that PyTorch made: every row as documented, equal to the slow way, of use to a jq query."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from replayfmt.dump.selection import Selection
from replayfmt.dump.stream import Query, jsonl_chunks, text_chunks
from replayfmt.format.reader import open_capture

from . import oracle
from .test_rows import lines, schema_of


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training steps of a small network, with operators of several kinds of arguments around them."""
    import torch

    import replayfmt

    path = tmp_path_factory.mktemp("real") / "real.opreplay"
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = torch.randn(4, 8)
    with replayfmt.capture(path):
        with replayfmt.scope("train"):
            for step in range(2):
                with replayfmt.scope(f"step {step}"):
                    loss = model(batch).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    loss.item()
        with replayfmt.scope("others"):
            batch.add_(1).clamp(min=-float("inf"), max=float("inf"))
            torch.fft.fft(batch).conj().mul(2 - 1j).abs().tolist()
            torch.cat([batch[:, :2], batch[:, 2:]], dim=1).to(torch.bfloat16).to_sparse().coalesce().to_dense()
            torch.bernoulli(batch.sigmoid(), generator=torch.Generator().manual_seed(2**63))
            torch.arange(10)[2:9223372036854775807].sum()
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    with open_capture(path) as reader:
        return [json.loads(line) for line in lines(reader)]


@pytest.mark.slow
def test_every_row_of_a_real_capture_is_as_documented(real: Path) -> None:
    validators = {kind: jsonschema.Draft202012Validator(schema_of(kind)) for kind in {r["kind"] for r in rows(real)}}
    for row in rows(real):
        validators[row["kind"]].validate(row)
    with open_capture(real) as reader:
        assert [row for row in rows(real) if "ordinal" in row] == [oracle.row(reader, r) for r in reader.records()]
        text = "".join(text_chunks(reader, Selection()))
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.slow
def test_rows_of_a_real_capture_name_arguments_as_the_schemas_do(real: Path) -> None:
    found = rows(real)
    kernels = {row["id"]: row for row in found if row["kind"] == "kernel"}
    calls = [row for row in found if row["kind"] == "op"]
    assert len(calls) == next(row for row in found if row["kind"] == "summary")["ops"] > 50
    for row in calls:
        kernel = kernels[row["kernel"]]
        assert (kernel["name"], kernel["overload"]) == (row["op"], row["overload"])
        for argument in row["args"]:
            assert f" {argument['name']}" in kernel["schema"]
    assert sum(kernel["calls"] for kernel in kernels.values()) == len(calls)
    used = {row["storage"] for row in found if row["kind"] == "storage_import"}
    assert used <= {row["id"] for row in found if row["kind"] == "storage"}


def test_a_query_finds_which_op_produced_a_tensor(real: Path) -> None:
    (read,) = (row for row in rows(real) if row["kind"] == "host_read")
    storage = read["value"]["storage"]
    with open_capture(real) as reader:
        chunks = list(jsonl_chunks(reader, Selection()))
    found = "".join(Query(f'select(.kind=="op" and any(.results[]; .storage == {storage})) | .op').apply(chunks))
    assert found.splitlines()[0] == '"aten::abs"'
