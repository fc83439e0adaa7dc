"""Random programs captured in two forms, of which it is known what they give to who runs them: a comparison calls no
pair equal that gives something else, and accuses no op of a pair that differs by rounding alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import replayfmt

Form = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
PAIRS = 35


def norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


# Of each step: a form that is wrong, and those that are equal but for rounding; the first one is that of capture a.
STEPS: dict[str, tuple[Form, ...]] = {
    "norm": (lambda x: F.layer_norm(x, (8,), eps=0.1), lambda x: F.layer_norm(x, (8,)), norm),
    "softmax": (lambda x: F.softmax(x * 1.01, -1), lambda x: F.softmax(x, -1), softmax),
    "gelu": (
        lambda x: F.gelu(x, approximate="tanh") * 1.001,
        F.gelu,
        lambda x: x * 0.5 * (1 + torch.erf(x * 0.7071067811865476)),
    ),
    "silu": (lambda x: x * torch.sigmoid(x * 1.01), F.silu, lambda x: x * torch.sigmoid(x)),
    "mm": (
        lambda x: x @ (WEIGHT * 1.001),
        lambda x: x @ WEIGHT,
        lambda x: torch.einsum("ij,jk->ik", x, WEIGHT),
        lambda x: torch.addmm(torch.zeros(8), x, WEIGHT),
    ),
    "add": (lambda x: x + 1.51, lambda x: x + 1.5, lambda x: x.clone().add_(1.5)),
    "tanh": (lambda x: torch.tanh(x) * 1.001, torch.tanh, lambda x: x.double().tanh().float()),
    "cat": (
        lambda x: torch.cat([x[:4], x[4:]]).mul(1.26),
        lambda x: torch.cat([x[:4], x[4:]]).mul(1.25),
        lambda x: torch.stack(list(x)).mul(1.25),
    ),
    "double": (lambda x: x * 2.001, lambda x: x * 2, lambda x: x + x),
}
ENDS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda y: y.sum().item(),
    "list": lambda y: y[0].tolist(),
    "index": lambda y: y.argmax(-1).tolist(),
    "text": lambda y: str(y[1]),
    "tensor": lambda y: y.mul(3),
}


class Pair:
    """One random program. `wrong` is a step that capture b gets wrong, -1 for none."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.seed = seed
        self.steps = [(dice.choice([*STEPS, "sum"]), dice.randint(0, n), dice.randint(0, n)) for n in range(6)]
        self.ends = [(dice.choice(list(ENDS)), dice.randint(1, 6)) for _ in range(dice.randint(1, 3))]
        self.forms = [dice.randrange(1, len(STEPS.get(kind, "..."))) for kind, *_ in self.steps]
        self.wrong = dice.randrange(6) if dice.random() < 0.5 else -1
        self.logs = {dice.randrange(6)} if dice.random() < 0.3 else set()
        self.keeps = dice.random() < 0.5

    def run(self, changed: bool) -> list[object]:
        values = [torch.randn(8, 8, generator=torch.Generator().manual_seed(self.seed))]
        for number, (kind, one, other) in enumerate(self.steps):
            x, off = values[one], changed and number == self.wrong
            if kind == "sum":
                values.append(x * 0.5 + values[other] * (0.26 if off else 0.25))
            else:
                values.append(STEPS[kind][0 if off else self.forms[number] if changed else 1](x))
            if changed and number in self.logs:
                values[-1].abs().max().item()
        return [ENDS[kind](values[place]) for kind, place in self.ends]

    def captured(self, path: Path, changed: bool) -> Path:
        with replayfmt.capture(path, digests="ops"):
            given = self.run(changed)
            if not self.keeps:
                del given
        return path

    def differs(self, within: float) -> bool:
        for one, other in zip(self.run(False), self.run(True), strict=True):
            if isinstance(one, str):
                if one != other and not within:
                    return True
            elif not torch.allclose(_numbers(one), _numbers(other), rtol=within, atol=within):
                return True
        return False


def _numbers(value: object) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


@pytest.mark.slow
def test_no_pair_that_gives_something_else_is_called_equal(tmp_path: Path) -> None:
    equal, named, differing, intact = 0, 0, 0, 0
    for seed in range(PAIRS):
        pair = Pair(seed)
        a, b = (pair.captured(tmp_path / f"{seed}{'ab'[side]}.opreplay", bool(side)) for side in (0, 1))
        exact, found = replayfmt.compare(a, b), replayfmt.compare(a, b, tolerance="auto")
        assert not (exact.ok and pair.differs(0)), (seed, exact.text)
        if pair.differs(1e-4):
            differing += 1
            named += found.first is not None
            assert not found.ok, (seed, found.text)
        if pair.wrong < 0:
            intact += 1
            equal += found.ok
            assert found.first is None, (seed, found.text)
    assert named >= 0.7 * differing and equal >= 0.7 * intact, (named, differing, equal, intact)
