"""A forward and a backward pass of a small MLP under the PyTorch profiler: makes a trace for `opreplay-import`.

python examples/profiled_mlp.py trace.json
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile, record_function

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("trace", metavar="TRACE")
asked = parser.parse_args()

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
inputs, labels = torch.randn(32, 64), torch.randint(10, (32,))
activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
with profile(activities=activities, record_shapes=True) as profiler, record_function("step"):
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
profiler.export_chrome_trace(asked.trace)
