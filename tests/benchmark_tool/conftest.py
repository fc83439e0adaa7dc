"""Small captures made here and now, and a way to run a tool in this process as its console script would."""

import sys

import pytest
import torch

import replayfmt

STEPS = 3


@pytest.fixture(scope="session")
def captured(tmp_path_factory):
    """A few training steps: scopes `init`, `execute`, and inside that `step` three times with `forward` in each."""
    path = tmp_path_factory.mktemp("capture") / "training.opreplay"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        with replayfmt.capture(path):
            with replayfmt.scope("init"):
                weight = torch.randn(48, 48, requires_grad=True)
            with replayfmt.scope("execute"):
                for _ in range(STEPS):
                    with replayfmt.scope("step"):
                        with replayfmt.scope("forward"):
                            loss = torch.mm(torch.ones(8, 48), weight).tanh().sum()
                        loss.backward()
                        with torch.no_grad():
                            weight.sub_(weight.grad, alpha=0.1)
                            weight.grad.zero_()
    finally:
        torch.set_num_threads(threads)
    return path


class Tool:
    """Runs a tool's `main` in this process; `out`, `err` and `code` are those of the last run."""

    def __init__(self, monkeypatch, capsys):
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out = self.err = ""
        self.code = None

    def __call__(self, main, *arguments):
        self._monkeypatch.setattr(sys, "argv", ["opreplay-tool", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        self.out, self.err = self._capsys.readouterr()
        self.code = left.value.code
        assert "Traceback" not in self.err
        return self.code


@pytest.fixture
def tool(monkeypatch, capsys):
    return Tool(monkeypatch, capsys)
