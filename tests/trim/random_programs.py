"""Programs of random steps: views, writes in place and from outside, randomness, settings, reads on the host."""

from __future__ import annotations

import torch

import replayfmt

# What a step does to the tensors there are; each takes two places among them and a small number.
# fmt: off
STEPS = ("add", "add_", "view", "transpose", "narrow", "copy_", "dropout", "normal_", "clone", "empty", "drop", "scope",
         "seed", "outside", "resize", "dtype", "item", "list", "index", "out")
# fmt: on


def run_steps(steps: list[tuple[str, int, int, int]]) -> list[torch.Tensor]:
    """The program; returns the tensors that are left. Every tensor has six elements, however they lie."""
    pool = [torch.arange(6.0), torch.ones(2, 3)]
    for name, one, other, number in steps:
        a, b = pool[one % len(pool)], pool[other % len(pool)]
        match name:
            case "add":
                pool.append(a.reshape(-1) + b.reshape(-1) * number)
            case "add_":
                a.add_(number)
            case "view":
                pool.append(a.reshape(3, 2))
            case "transpose":
                pool.append(a.reshape(2, 3).t())
            case "narrow":
                a.reshape(-1)[number % 6].mul_(2)
            case "copy_":
                a.copy_(b.reshape(a.shape).clone())
            case "dropout":
                pool.append(torch.nn.functional.dropout(a, 0.5))
            case "normal_":
                a.normal_()
            case "clone":
                pool.append(a.clone())
            case "empty":
                fresh = torch.empty(6)
                fresh[:3] = 1
                fresh[3:] = number
                pool.append(fresh)
            case "drop":
                if len(pool) > 2:
                    del pool[one % len(pool)]
            case "scope":
                with replayfmt.scope(f"s{number}"):
                    a.mul_(0.5)
            case "seed":
                torch.manual_seed(number)
            case "outside":
                a.numpy()[...] = number
            case "resize":
                grown = a.clone()
                grown.resize_(8).fill_(number)
                pool.append(grown[:6])
            case "dtype":
                torch.set_default_dtype(torch.float64)
                pool.append((a.double() + torch.ones(a.shape)).float())
                torch.set_default_dtype(torch.float32)
            case "item":
                a.sum().item()
            case "list":
                pool += [torch.cat(a.reshape(-1).split(2))]
            case "index":
                a.reshape(-1)[torch.tensor([0, number % 6])] = 1
            case "out":
                torch.add(a.reshape(-1), 1, out=torch.empty(0))
    return pool
