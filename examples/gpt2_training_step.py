"""One training step of a small GPT-2 with random weights: what `make demo` captures.

The program knows nothing of where it is recorded. Its scopes do nothing unless something records:

    opreplay-capture -o step.opreplay examples/gpt2_training_step.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import replayfmt

torch.manual_seed(0)

with replayfmt.scope("init"):
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()  # dropout stays on: its random numbers are captured too
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(config.vocab_size, (2, 32))

with replayfmt.scope("execute"):
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

with replayfmt.scope("deinit"):
    print(f"loss {loss.item():.6f}")
