"""vLLM generates the same tokens under a capture; the capture is replayed, measured, substituted, cut, and made from a
profiler trace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import EXAMPLE, ROOT, Served, run

VLLM = "--allow-import=vllm"
ENGINE_OPERATORS = {
    "_C::compute_slot_mapping_kernel_impl",
    "_C::cpu_attention_with_kv_cache",
    "_C::cpu_attn_reshape_and_cache",
    "_C::get_scheduler_metadata",
    "_C::onednn_mm",
}


def rows(*command: object) -> list[dict]:
    return [json.loads(line) for line in run(*command).splitlines()]


@pytest.fixture
def llama(served: Served) -> Served:
    if served.family != "llama":
        pytest.skip("once is enough")
    return served


def test_a_capture_changes_no_token(served: Served) -> None:
    assert len(served.alone) == 4 and served.captured == served.alone


def test_all_that_the_engine_did_is_recorded(served: Served) -> None:
    (summary,) = (row for row in rows("opreplay-dump", "--format=jsonl", served.capture) if row["kind"] == "summary")
    assert summary["unsupported"] == {} and summary["strict_replay_supported"]
    kernels = {
        row["name"] for row in rows("opreplay-dump", "--jq", 'select(.kind == "kernel") | {name}', served.capture)
    }
    assert kernels >= ENGINE_OPERATORS


def test_a_strict_replay_is_the_same_bit_for_bit(served: Served) -> None:
    output = run("opreplay-run", "--verify=bitwise", VLLM, served.capture)
    assert "verified: bitwise" in output
    compared = re.search(r"compared: ([0-9,]+) digests, ([0-9,]+) host reads", output)
    assert compared is not None and int(compared[1]) > 0 and int(compared[2]) > 0


def test_each_op_is_measured_on_its_own(llama: Served) -> None:
    # 1 where the engine released a handle: that cannot be done again and again, and is refused.
    output = run("opreplay-benchmark", "--per-op", "--benchmark-min-time=1x", VLLM, llama.capture, or_code=1)
    refused = re.findall(r" not measured .* refused +([\w:]+)", output)
    assert set(refused) <= {"_C::release_dnnl_matmul_handler"}
    (attempted,) = re.findall(r"attempted\s+([0-9,]+) = ([0-9,]+) successful", output)
    assert attempted[0] == attempted[1]


def test_a_kernel_of_the_engine_is_replaced_and_checked(llama: Served, tmp_path: Path) -> None:
    kernel = (ROOT / "examples" / "rotary_kernel.py").read_text()
    place = tmp_path / "kernels.py"
    substitution = f"--replay-kernel-substitution=_C::rotary_embedding={place}"
    place.write_text(kernel)
    output = run("opreplay-run", VLLM, substitution, llama.capture)
    assert "each checked against the original kernel" in output and "verified: close" in output
    place.write_text(kernel.replace("one * c - other * s", "one * c + other * s"))
    run("opreplay-run", VLLM, substitution, llama.capture, code=1)


def test_one_step_is_cut_out_and_replays_by_itself(llama: Served, tmp_path: Path) -> None:
    steps = rows(
        "opreplay-dump", "--jq", 'select(.kind == "scope_begin" and .name == "step") | {ordinal}', llama.capture
    )
    first, after = steps[3]["ordinal"], steps[4]["ordinal"]
    run("opreplay-trim", VLLM, f"--ops={first}:{after}", llama.capture, tmp_path / "step.opreplay")
    output = run("opreplay-run", VLLM, tmp_path / "step.opreplay")
    assert "verified: bitwise" in output


def test_a_profiler_trace_of_the_engine_replays_with_initializers(tmp_path: Path) -> None:
    run("python", EXAMPLE, tmp_path / "model", "--tokens=3", f"--trace={tmp_path / 'trace.json'}")
    report = tmp_path / "report.jsonl"
    run(
        "opreplay-import",
        VLLM,
        "--string-default=_C::get_scheduler_metadata.isa_hint=vec",
        "--string-default=_C::cpu_attn_reshape_and_cache.isa=vec",
        f"--report={report}",
        tmp_path / "trace.json",
        "-o",
        tmp_path / "trace.opreplay",
    )
    imported = [json.loads(line) for line in report.read_text().splitlines()]
    lacking = {row["op"] for row in imported if row.get("status") == "incomplete"}
    assert lacking == {"aten::index"}, "a profiler records no lists of optional tensors"
    output = run("opreplay-run", "--keep-going", VLLM, tmp_path / "trace.opreplay", code=1)
    (verdicts,) = re.findall(r"verdicts: ([0-9]+) ok, 0 refused, 0 failed, 0 mismatched, 0 skipped", output)
    assert int(verdicts) > 400
    for operator in ("_C::get_scheduler_metadata", "_C::cpu_attention_with_kv_cache"):
        assert operator in output
