"""Programs that several tests run under opreplay-capture."""

import pytest

from .running import Captured, capture, plain

TRAIN = """
import os, sys
os.environ["CHOSEN_BEFORE_TORCH"] = "1"
import torch
import numpy as np

torch.manual_seed(0)
data = torch.from_numpy(np.ones((4, 3), dtype=np.float32))
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

def step(x):  # without an optimizer, whose import takes longer than all else
    net.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.item()

if __name__ == "__main__":
    print([round(step(data), 4) for _ in range(3)], sys.argv[1:])
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(TRAIN)
    (folder / "no_torch.py").write_text("print('no torch here')\n")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture(scope="session")
def ordinary(folder):
    """train.py under python and under opreplay-capture: (what python printed, our process, its capture)."""
    arguments = ("train.py", "--force", "-o", "elsewhere", "--", "-m")
    expected = plain(folder, *arguments).stdout
    done = capture(folder, "-o", "plain.opreplay", *arguments)
    return expected, done, Captured(folder / "plain.opreplay")
