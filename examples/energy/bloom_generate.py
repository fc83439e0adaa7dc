"""Greedy generation with BLOOM-560m's configuration and random weights; `--small` makes it a toy of the same kind.

    python examples/energy/bloom_generate.py [--small] [--tokens N] [--device cuda]

The scope `generate` holds the generation and not the building of the model.
"""

import argparse

import torch
from transformers import BloomConfig, BloomForCausalLM

import replayfmt

BLOOM_560M = {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16}
SMALL = {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=8, metavar="N")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()

    torch.manual_seed(0)
    config = BloomConfig(**(SMALL if asked.small else BLOOM_560M), bos_token_id=1, eos_token_id=2, pad_token_id=3)
    model = BloomForCausalLM(config).eval().to(asked.device)
    prompt = torch.tensor([[11, 7, 5, 13]], device=asked.device)
    with torch.inference_mode(), replayfmt.scope("generate"):
        ids = model.generate(
            prompt, max_new_tokens=asked.tokens, min_new_tokens=asked.tokens, do_sample=False, use_cache=True
        )
    print("tokens", *ids[0].tolist())


if __name__ == "__main__":
    main()
