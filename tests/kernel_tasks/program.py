"""A program whose kernels are replaced in tests: layers of two shapes, a softmax, a product in bfloat16."""

import torch

import replayfmt

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.LayerNorm(64))
with torch.no_grad():
    for batch in (4, 7, 4, 4):
        x = torch.randn(batch, 64)
        with replayfmt.scope("block"):
            y = net(x)
        probabilities = torch.softmax(y, -1)
        y.mul_(2.0)
        z = torch.mm(x.bfloat16(), torch.randn(64, 48).bfloat16())
    print(float(probabilities.sum()), float(z.float().sum()))
