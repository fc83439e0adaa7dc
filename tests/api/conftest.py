"""A capture of a small program that the library's face is tried on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import replayfmt

NAME = "step <b>&"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear layer, batch norm, a view, a number that the program read, an op in place, lists and a sparse tensor."""
    path = tmp_path_factory.mktemp("api") / "small.opreplay"
    torch.manual_seed(0)
    linear, x, norm = torch.nn.Linear(8, 4), torch.arange(16.0).reshape(2, 8), torch.nn.BatchNorm1d(4)
    with torch.no_grad(), replayfmt.capture(path, digests="ops"), replayfmt.scope(NAME):
        y = norm(linear(x))
        y.sum().item()
        x.add_(1)
        x.t().relu()
        torch.cat([linear.weight, linear.weight])
        norm(y)
        torch.eye(3).to_sparse().to_dense()
    return path
