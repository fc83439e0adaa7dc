"""Greedy generation with a small GPT-2 whose weights are mapped from a file.

    python examples/checkpoint_inference.py DIRECTORY [--tokens N]

Saves a checkpoint with random weights to DIRECTORY where there is none yet, as `save_pretrained` does, and loads it as
`from_pretrained` does: the weights are mapped out of `model.safetensors`. A capture of it refers to the file.
"""

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import replayfmt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY")
    parser.add_argument("--tokens", type=int, default=8, metavar="N")
    asked = parser.parse_args()

    torch.manual_seed(0)
    if not os.path.exists(os.path.join(asked.directory, "model.safetensors")):
        config = GPT2Config(
            vocab_size=500, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        GPT2LMHeadModel(config).save_pretrained(asked.directory)
    model = GPT2LMHeadModel.from_pretrained(asked.directory).eval()

    ids = torch.tensor([[11, 7, 5]])
    with torch.inference_mode(), replayfmt.scope("execute"):
        for _ in range(asked.tokens):
            best = model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, best), 1)
    print("tokens", *ids[0].tolist())


if __name__ == "__main__":
    main()
