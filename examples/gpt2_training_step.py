"""One training step of a small GPT-2 with random weights, in plain PyTorch: what `make demo` captures.

The program knows nothing of where it is recorded. Its scopes do nothing unless something records:

    opreplay-capture -o step.opreplay examples/gpt2_training_step.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import replayfmt

WIDTH, HEADS, LAYERS, POSITIONS, VOCABULARY = 64, 4, 2, 64, 256
TEXT = b"A successful replay means that the captured work was reproduced."


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and around a residual connection."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)  # stays on: its random numbers are captured too

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3 * HEADS, -1).transpose(1, 2).chunk(3, 1)
        attended = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.dropout(self.projection(attended))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT2(nn.Module):
    """Token and position embeddings, blocks, and a head that shares its weight with the token embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


torch.manual_seed(0)

with replayfmt.scope("init"):
    model = GPT2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.tensor(list(TEXT)).view(2, 32)

with replayfmt.scope("execute"):
    logits = model(tokens)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

with replayfmt.scope("deinit"):
    print(f"loss {loss.item():.6f}")
