"""A few training steps of a small perceptron, in plain PyTorch, each in a scope of its own.

opreplay-capture -o mlp.opreplay examples/mlp_training.py --steps 3
"""

import argparse

import torch

import replayfmt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = torch.randn(64, 16), torch.randint(4, (64,))

    for step in range(steps):
        with replayfmt.scope(f"step {step}"):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
