"""Hugging Face models in miniature: inference, generation, and training with the results it has without a capture."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

import replayfmt  # noqa: E402

from .conftest import Capture  # noqa: E402

VOCABULARY = 64
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    **_TOKENS,
}


def tokens(length: int = 8, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=64, **_TOKENS, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def text_models() -> dict[str, Callable[[], Any]]:
    t = transformers
    return {
        "gpt2": gpt2,
        "gpt2_eager_attention": lambda: gpt2(attn_implementation="eager"),
        "llama": llama,
        "bert": lambda: t.BertModel(
            t.BertConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=VOCABULARY
            )
        ),
        "bloom": lambda: t.BloomForCausalLM(
            t.BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=VOCABULARY, **_TOKENS)
        ),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=4, **_DECODER)),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=8, **_DECODER)
        ),
        "mamba": lambda: t.MambaForCausalLM(
            t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4, **_TOKENS)
        ),
        "mamba2": lambda: t.Mamba2ForCausalLM(
            t.Mamba2Config(
                hidden_size=32,
                num_hidden_layers=2,
                vocab_size=VOCABULARY,
                state_size=8,
                num_heads=4,
                head_dim=16,
                n_groups=1,
                chunk_size=4,
                **_TOKENS,
            )
        ),
    }


def image_models() -> dict[str, Callable[[], Any]]:
    t = transformers
    return {
        "resnet": lambda: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
            )
        ),
    }


@pytest.mark.recorder("python", "native")
@pytest.mark.slow
@pytest.mark.parametrize("name", text_models())
def test_text_models_replay_bit_for_bit(capture: Capture, name: str) -> None:
    model, ids = text_models()[name]().eval(), tokens()
    with torch.no_grad():
        captured = capture(lambda: model(input_ids=ids), digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


@pytest.mark.parametrize("name", image_models())
def test_image_models_replay_bit_for_bit(capture: Capture, name: str) -> None:
    model, image = image_models()[name]().eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        captured = capture(lambda: model(image), digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_an_encoder_and_decoder_replay_bit_for_bit(capture: Capture) -> None:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    model, ids, labels = transformers.T5ForConditionalGeneration(config).eval(), tokens(), tokens()
    captured = capture(lambda: model(input_ids=ids, labels=labels), digests="ops")
    assert captured.unsupported() == {}
    captured.replays()


def test_inference_mode_replays_bit_for_bit(capture: Capture) -> None:
    model, ids = llama().eval(), tokens()
    with torch.inference_mode():
        captured = capture(lambda: [model(input_ids=ids).logits for _ in range(3)])
    assert captured.unsupported() == {}
    captured.replays()


@pytest.mark.recorder("python", "native")
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True},
        {"num_beams": 2, "do_sample": False},
        {"cache_implementation": "static", "do_sample": False, "disable_compile": True},
    ],
    ids=["sampling", "beams", "static_cache"],
)
def test_generation_replays_bit_for_bit(capture: Capture, how: dict[str, Any]) -> None:
    model, ids = llama().eval(), tokens(4, 1)
    captured = capture(
        lambda: model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5, **how)
    )
    assert captured.unsupported() == {}
    captured.replays()


def train(
    make_optimizer: Callable[..., Any],
    *,
    dropout: float = 0.1,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    clipped: bool = False,
    checkpoint: bool | None = None,
) -> list[torch.Tensor]:
    """Three steps; the parameters and their optimizer's state after them."""
    torch.manual_seed(1)
    model, ids = gpt2(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout).train(), tokens()
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    for step in range(3):
        with replayfmt.scope(f"step {step}"):
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(backward)
            else:
                backward()
                scaler.step(optimizer)
                scaler.update()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*(p.detach() for p in model.parameters()), *state]


TRAINING: dict[str, Callable[[], list[torch.Tensor]]] = {
    "sgd": partial(train, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adamw_loop": partial(train, partial(torch.optim.AdamW, lr=0.1, foreach=False)),
    "adamw_foreach_clipped": partial(train, partial(torch.optim.AdamW, lr=0.1, foreach=True), clipped=True),
    "adamw_fused": partial(train, partial(torch.optim.AdamW, lr=0.1, fused=True)),
    "adagrad": partial(train, partial(torch.optim.Adagrad, lr=0.1)),
    "lbfgs": partial(train, partial(torch.optim.LBFGS, lr=0.1, max_iter=2), dropout=0.0),
    "checkpoint_reentrant": partial(train, partial(torch.optim.SGD, lr=0.1), checkpoint=True),
    "checkpoint": partial(train, partial(torch.optim.SGD, lr=0.1), checkpoint=False),
    "autocast_bfloat16": partial(train, partial(torch.optim.AdamW, lr=0.1), autocast=torch.bfloat16),
    "float16_with_scaler": partial(train, partial(torch.optim.SGD, lr=0.1), autocast=torch.float16, scaled=True),
}


def muon() -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    optimizer, x = torch.optim.Muon(model.parameters(), lr=0.1), torch.randn(3, 8)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.recorder("python", "native")
@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINING, "muon"])
def test_training_replays_bit_for_bit_and_is_not_changed_by_a_capture(capture: Capture, name: str) -> None:
    program = TRAINING.get(name, muon)
    expected = program()
    captured = capture(program)
    assert captured.unsupported() == {}
    assert all(torch.equal(got, wanted) for got, wanted in zip(captured.returned, expected, strict=True))
    captured.replays()
