"""What step-1.0.opreplay was recorded from: python step.py OUT.opreplay"""

import sys

import torch

import replayfmt

torch.manual_seed(0)
torch.set_num_threads(1)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
inputs, labels = torch.randn(5, 8), torch.randint(0, 4, (5,))

with replayfmt.capture(sys.argv[1]), replayfmt.scope("execute"):
    for step in range(2):
        with replayfmt.scope(f"step {step}"):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(inputs), labels)
            loss.backward()
            optimizer.step()
            print(loss.item())
