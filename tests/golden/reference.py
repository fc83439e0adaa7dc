"""What reference-1.0.opreplay was recorded from. `python reference.py save` writes model.safetensors; then

    opreplay-capture --payload=integers --file=model.safetensors --file-validation=digest --redact \
        -o reference-1.0.opreplay reference.py
"""

import sys

import torch
from safetensors.torch import load_file, save_file

torch.manual_seed(0)
torch.set_num_threads(1)
network = torch.nn.Sequential(
    torch.nn.Embedding(10, 16), torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)
)
if sys.argv[1:] == ["save"]:
    save_file(network.state_dict(), "model.safetensors")
else:
    network.load_state_dict(load_file("model.safetensors"))
    tokens = torch.tensor([[1, 2, 3], [3, 2, 9]])
    noise = torch.from_numpy(torch.randn(2, 3, 4).numpy().copy())
    print((network(tokens) + noise).sum().item())
