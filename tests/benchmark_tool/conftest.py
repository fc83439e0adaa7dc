"""Small captures made here and now."""

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
