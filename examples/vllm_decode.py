"""A few decode steps of vLLM's CPU build, on a small model with random weights.

    python examples/vllm_decode.py DIRECTORY [--family llama|qwen3|mixtral] [--tokens N] [--compiled] [--trace FILE]

Saves a checkpoint of the family to DIRECTORY where there is none yet, starts the engine in this process, and generates
greedily and by sampling; with --compiled in the engine's default, compiled mode, otherwise eagerly. With --trace a
profiler trace of the greedy steps is written to FILE. docs/serving.md says how to install vLLM, and what to do with a
capture or a trace of this program.
"""

import argparse
import os
from contextlib import nullcontext

# The engine's work has to be done in this process: a capture does not see that of another.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from vllm import LLM, SamplingParams

import replayfmt

SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)),
}
PROMPTS = [[1, 5, 9, 33, 7], [2, 4, 8]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY")
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument("--tokens", type=int, default=8, metavar="N")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--trace", metavar="FILE")
    asked = parser.parse_args()

    torch.manual_seed(0)
    if not os.path.exists(os.path.join(asked.directory, "model.safetensors")):
        FAMILIES[asked.family]().to(torch.bfloat16).save_pretrained(asked.directory)

    engine = LLM(
        model=asked.directory,
        skip_tokenizer_init=True,
        enforce_eager=not asked.compiled,
        dtype="bfloat16",
        seed=0,
        max_model_len=128,
        max_num_seqs=4,
        num_gpu_blocks_override=16,
    )
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    ways = {
        "greedy": SamplingParams(temperature=0, max_tokens=asked.tokens, ignore_eos=True, detokenize=False),
        "sampled": SamplingParams(
            temperature=1, top_k=20, seed=7, max_tokens=asked.tokens, ignore_eos=True, detokenize=False
        ),
    }
    for name, how in ways.items():
        watched = asked.trace and name == "greedy"
        profiler = torch.profiler.profile(record_shapes=True) if watched else nullcontext()
        with profiler, replayfmt.scope(name):
            answers = engine.generate(prompts, how, use_tqdm=False)
        if watched:
            profiler.export_chrome_trace(asked.trace)
        for answer in answers:
            print(name, *answer.outputs[0].token_ids)


if __name__ == "__main__":
    main()
