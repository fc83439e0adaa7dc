"""Small models of three kinds: GPT-2, steps of a Llama that decodes, a mixture of experts."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import replayfmt

torch.manual_seed(0)
gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)).eval()
llama = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
).eval()
gate, up, down = torch.randn(4, 16), torch.randn(4, 16, 32), torch.randn(4, 32, 16)
with torch.no_grad():
    tokens = torch.randint(0, 64, (2, 8))
    with replayfmt.scope("gpt2"):
        logits = gpt2(tokens).logits
    out = llama(torch.tensor([[1, 5, 9]]), use_cache=True)
    for _ in range(2):
        token = out.logits[:, -1:].argmax(-1)
        with replayfmt.scope("decode"):
            out = llama(token, past_key_values=out.past_key_values, use_cache=True)
    x = torch.randn(12, 16)
    with replayfmt.scope("experts"):
        weights, chosen = torch.topk(torch.softmax(x @ gate.t(), -1), 2)
        mixed = torch.zeros_like(x)
        for expert in range(4):
            rows, slot = torch.where(chosen == expert)
            hidden = torch.relu(x[rows] @ up[expert]) @ down[expert]
            mixed.index_add_(0, rows, hidden * weights[rows, slot][:, None])
    print(float(logits.sum() + out.logits.sum() + mixed.sum()))
