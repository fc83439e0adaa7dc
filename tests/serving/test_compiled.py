"""vLLM in its default, compiled mode: what Inductor generated for the model's layers is recorded and replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import EXAMPLE, STEPS, Served, run, tokens
from .test_vllm import ENGINE_OPERATORS, VLLM, rows

LAYERS = 2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The engine generates in compiled mode, alone and under a capture. What it compiles is cached for both."""
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_CACHE_ROOT", str(place / "cache"))
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(place / "inductor"))
        program = (EXAMPLE, place / "model", "--compiled", "--tokens=4")
        alone = run("python", *program)
        capture = place / "compiled.opreplay"
        captured = run("opreplay-capture", "-o", capture, STEPS, *program)
    return Served("llama", capture, tokens(alone), tokens(captured))


def test_a_capture_changes_no_token(compiled: Served) -> None:
    assert len(compiled.alone) == 4 and compiled.captured == compiled.alone


def test_all_work_of_the_layers_is_recorded(compiled: Served) -> None:
    (summary,) = (row for row in rows("opreplay-dump", "--format=jsonl", compiled.capture) if row["kind"] == "summary")
    assert summary["unsupported"] == {} and summary["strict_replay_supported"]
    ops = rows("opreplay-dump", "--jq", 'select(.kind == "op") | {op, scope}', compiled.capture)
    assert {op["op"] for op in ops} >= ENGINE_OPERATORS
    steps = [row for row in rows("opreplay-dump", "--jq", 'select(.kind == "scope_begin") | {name}', compiled.capture)]
    passes = sum(row["name"] == "step" for row in steps)
    attended = sum(op["op"] == "_C::cpu_attention_with_kv_cache" for op in ops if op["scope"].endswith("step"))
    generated = sum(op["op"].startswith("inductor_cpp::") for op in ops if op["scope"].endswith("step"))
    assert attended == LAYERS * passes and generated >= attended


def test_a_strict_replay_is_the_same_bit_for_bit(compiled: Served) -> None:
    run("opreplay-run", VLLM, compiled.capture, code=1)  # code in it is not run unasked
    output = run("opreplay-run", "--verify=bitwise", "--allow-code", VLLM, compiled.capture)
    assert "verified: bitwise" in output
    compared = re.search(r"compared: ([0-9,]+) digests, ([0-9,]+) host reads", output)
    assert compared is not None and int(compared[1]) > 0 and int(compared[2]) > 0


def test_a_generated_kernel_is_replaced_and_measured(compiled: Served, tmp_path: Path) -> None:
    kernels = rows("opreplay-dump", "--jq", 'select(.kind == "kernel") | {name, schema}', compiled.capture)
    (name,) = {row["name"] for row in kernels if "_silu_" in row["name"]}
    place = tmp_path / "kernels.py"
    place.write_text(
        "import torch\n"
        "def gated(in_ptr0, out_ptr0, ks0):\n"
        "    gate, up = in_ptr0.float().chunk(2, -1)\n"
        "    out_ptr0.copy_(torch.nn.functional.silu(gate) * up)\n"
    )
    substitution = f"--replay-kernel-substitution={name}={place}:gated"
    output = run("opreplay-run", "--allow-code", VLLM, substitution, compiled.capture)
    assert "each checked against the original kernel" in output and "verified: close" in output
    output = run(
        "opreplay-benchmark",
        "--per-op",
        "--benchmark-min-time=3x",
        "--allow-code",
        f"--kernel={name}",
        VLLM,
        compiled.capture,
    )
    assert re.search(r"attempted\s+([0-9,]+) = \1 successful", output), output
