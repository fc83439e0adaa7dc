"""BLOOM-560m's configuration with random weights: greedy generation, or a model file; `--small` makes it a toy.

    python examples/energy/bloom_generate.py [--small] [--tokens N] [--device cuda] [--model FILE]

With `--model`, it runs FILE once instead: TorchScript (`torch.jit`, FILE.pt) or an exported program (`torch.export`,
FILE.pt2), which takes token ids and returns logits. If FILE is not there, the BLOOM is exported to it first. The scope
`generate` holds the work and not what comes before it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import BloomConfig, BloomForCausalLM

import replayfmt

BLOOM_560M = {"vocab_size": 250880, "hidden_size": 1024, "n_layer": 24, "n_head": 16}
SMALL = {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4}


class Logits(torch.nn.Module):
    """What a file can hold: tensors in, a tensor out."""

    def __init__(self, model: BloomForCausalLM) -> None:
        super().__init__()
        self.model = model
        for module in model.modules():
            if hasattr(module, "gelu_impl"):  # a Python function of autograd, which TorchScript does not have
                module.gelu_impl = torch.nn.GELU(approximate="tanh")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False, return_dict=False)[0]


def bloom(small: bool, device: str) -> BloomForCausalLM:
    torch.manual_seed(0)
    config = BloomConfig(**(SMALL if small else BLOOM_560M), bos_token_id=1, eos_token_id=2, pad_token_id=3)
    return BloomForCausalLM(config).eval().to(device)


def export(model: torch.nn.Module, ids: torch.Tensor, file: Path) -> None:
    with torch.no_grad():
        if file.suffix == ".pt2":
            torch.export.save(torch.export.export(model, (ids,)), file)
        else:
            torch.jit.trace(model, (ids,), strict=False).save(file)


def load(file: Path, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if file.suffix == ".pt2":
        return torch.export.load(file).module()
    return torch.jit.load(file, map_location=device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="to generate, or of the prompt of FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, metavar="FILE", help="TorchScript (.pt) or an exported program (.pt2)")
    asked = parser.parse_args()

    if asked.model is not None:
        ids = torch.arange(4, 4 + asked.tokens, device=asked.device).unsqueeze(0)
        if not asked.model.exists():
            export(Logits(bloom(asked.small, asked.device)).eval(), ids, asked.model)
        run = load(asked.model, asked.device)
        with torch.no_grad():
            run(ids)  # TorchScript optimizes while it runs first
            with replayfmt.scope("generate"):
                logits = run(ids)
        print("next token", int(logits[0, -1].argmax()))
        return
    model = bloom(asked.small, asked.device)
    prompt = torch.tensor([[11, 7, 5, 13]], device=asked.device)
    with torch.inference_mode(), replayfmt.scope("generate"):
        ids = model.generate(
            prompt, max_new_tokens=asked.tokens, min_new_tokens=asked.tokens, do_sample=False, use_cache=True
        )
    print("tokens", *ids[0].tolist())


if __name__ == "__main__":
    main()
