"""Operators whose inputs must lie in a domain run on content that was not captured, in replays and in scripts."""

import itertools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import replayfmt
from replayfmt.dump.selection import OpSelection
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.environment import preserved_settings
from replayfmt.trim.script import synthesized_script

from .operator_samples import SHARE, operators, replay_samples

SPD = torch.eye(4) * 2
HALF = torch.full((8,), 0.5)
PROGRAMS: dict[str, Callable[[], object]] = {
    "bernoulli of itself": lambda: torch.bernoulli(HALF),
    "bernoulli of a copy": lambda: torch.bernoulli(HALF.to(torch.float64, copy=True)),
    "bernoulli of what is left": lambda: torch.bernoulli(1 - HALF * 0.25),
    "drawn in place": lambda: torch.empty(8).bernoulli_(HALF),
    "binomial": lambda: torch.binomial(HALF * 4, HALF),
    "binomial of copies": lambda: torch.binomial((HALF * 4).clone(), HALF),
    "dirichlet": lambda: torch._sample_dirichlet(HALF),
    "normal": lambda: torch.normal(HALF, HALF),
    "binary cross entropy": lambda: F.binary_cross_entropy(HALF, HALF.clone()),
    "targets alone": lambda: F.binary_cross_entropy(torch.sigmoid(HALF * 3), HALF),
    "cholesky": lambda: torch.linalg.cholesky(SPD),
    "cholesky of a batch": lambda: torch.linalg.cholesky(SPD.expand(3, 4, 4)),
    "cholesky of a part": lambda: torch.linalg.cholesky(SPD[1:, 1:]),
    "cholesky of a copy": lambda: torch.linalg.cholesky(SPD.clone()),
    "cholesky of complex numbers": lambda: torch.linalg.cholesky(SPD.to(torch.complex64)),
    "cholesky solve": lambda: torch.cholesky_solve(HALF[:4, None], SPD),
    "multivariate normal": lambda: torch.distributions.MultivariateNormal(HALF[:4], SPD).sample(),
    "weights to draw by": lambda: torch.multinomial(HALF, 3),
    "classes kept as floats": lambda: F.nll_loss(HALF.view(2, 4), (HALF[:2] * 2).long()),
    "rows kept as floats": lambda: HALF.index_select(0, HALF.to(torch.int64)),
}


@pytest.mark.parametrize("payload", ["none", "integers"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_content_that_was_not_captured_lies_in_the_domain(tmp_path: Path, name: str, payload: str) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay", payload=payload):
        PROGRAMS[name]()
    with replayfmt.Plan(tmp_path / "c.opreplay") as plan:
        plan.execute(verify="none")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_without_data_follows_the_same_rules(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replayfmt.capture(tmp_path / "c.opreplay"):
        PROGRAMS[name]()
    _run_script(tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_script_s_integers_do_the_work_that_those_of_a_replay_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, ids = torch.randn(100, 4), torch.zeros(64, dtype=torch.int64)
    mask = torch.arange(100) % 3 == 0
    with replayfmt.capture(tmp_path / "c.opreplay"):
        F.embedding(ids, table)
        F.embedding_bag(ids, table, torch.tensor([0, 10, 64]), include_last_offset=True)
        table.masked_select(mask[:, None])
    ran = _run_script(tmp_path, monkeypatch)
    storages = {len(each): each for each in (torch.tensor(s.tolist(), dtype=torch.uint8) for s in ran["inputs"]())}
    assert len(storages[64 * 8].view(torch.int64).unique()) > 20
    assert storages[3 * 8].view(torch.int64).tolist() == [0, 32, 64]
    assert int(storages[100].sum()) == int(mask.sum())


def _run_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    with CaptureReader(folder / "c.opreplay") as reader:
        synthesized_script(reader, str(folder / "script.py"), OpSelection())
    monkeypatch.setattr(sys, "argv", ["script.py"])
    with preserved_settings():  # a script sets those of its capture for its whole process
        module = runpy.run_path(str(folder / "script.py"))
        assert module["main"]() == 0
    return module


@pytest.mark.sweep
@pytest.mark.parametrize("payload", ["none", "integers"])
def test_samples_of_pytorch_s_operators_run_on_synthesized_inputs(tmp_path: Path, payload: str) -> None:
    """Of every eighth operator; `python -m initializers.operator_samples` runs all."""
    first = ("none", "integers").index(payload)
    named = dict(itertools.islice(operators().items(), first, None, 8))
    outcomes = replay_samples(named, payload, tmp_path, samples=2)
    assert outcomes.ran > 100
    assert outcomes.share >= SHARE, str(outcomes)
