"""Greedy generation with a Llama model that is spread over ranks by tensor parallelism, with random weights.

torchrun --nproc-per-node=2 opreplay-capture -o out/ tensor_parallel_llama.py [--vicuna] [--tokens N]

The model is small; --vicuna gives it the configuration of Vicuna-7B.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--vicuna", action="store_true")
parser.add_argument("--tokens", type=int, default=4)
arguments = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),))
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
else:
    torch.set_num_threads(1)

small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=32000 if arguments.vicuna else 256, **({} if arguments.vicuna else small))
torch.manual_seed(0)
torch.set_default_dtype(torch.float16 if device == "cuda" else torch.float32)
model = LlamaForCausalLM(config).to(device).eval()
for layer in model.model.layers:
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    parallelize_module(layer, mesh, plan)

prompt = torch.arange(1, 9, device=device).unsqueeze(0)
with torch.inference_mode():
    tokens = model.generate(prompt, max_new_tokens=arguments.tokens, do_sample=False, pad_token_id=0)
if dist.get_rank() == 0:
    print("tokens", *tokens[0].tolist())
dist.destroy_process_group()
