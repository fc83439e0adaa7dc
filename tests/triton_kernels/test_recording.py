"""What a capture has of Triton's launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.operator_schema import parse_operator_schema
from replayfmt.format.reader import CaptureReader

from .conftest import WRAPS_INTERPRETED

# Of each program: its kernels, with the arguments that each writes.
WRITTEN = {
    "softmax": {"softmax_kernel": {"out"}},
    "matmul": {"matmul_kernel": {"c"}},
    "layer_norm": {"norm_forward": {"y", "mean", "rstd"}, "norm_backward": {"dx", "dw", "db"}},
    "flash_attention": {"flash_attention_kernel": {"out"}},
    "atomics": {"count_kernel": {"counts", "most"}},
    "in_place": {"double_kernel": {"x"}},
    "strided": {"strided_kernel": {"out"}},
    "autotuned": {"fill_kernel": {"out"}},
    "autotuned_without_care": {"fill_kernel": {"out"}},
    "autotuned_by_a_class_of_its_own": {"calling_kernel": {"out"}},
    "calling": {"calling_kernel": {"out"}},
    "names_of_a_script": {"softmax_kernel": {"out"}, "run": {"x"}, "t3": {"x"}, "calling_kernel": {"out"}},
    "given_a_function": {"applied_kernel": {"out"}},
    "constexprs_of_each_kind": {"constexprs_kernel": {"out"}},
    "stand_ins_that_are_not_read": {"optional_kernel": {"out"}},
    "in_a_function_that_hides_a_global": {"scaling_kernel": {"x"}},
    "tuples_and_none": {"tuples_kernel": {"outs_0", "outs_1"}},
    "descriptors": {"described_kernel": {"out"}},
    "names_that_launches_have": {"launch_grid_kernel": {"x"}},
    "functions_of_python_for_constants": {"sorted_bits_kernel": {"out"}},
    "given_by_name_alone": {"named_kernel": {"x"}},
    "written_through_an_array_between": {"double_kernel": {"x"}, "softmax_kernel": {"out"}},
    "random_numbers": {"random_kernel": {"out"}},
    **({"inside_an_operator": {}} if WRAPS_INTERPRETED else {}),
    "inside_an_operator_with_state": {"fill_kernel": {"out"}},
}
REFUSED = {
    "a_global_tensor": "reads the global variable TABLE, which holds a Tensor",
    "a_function_that_is_not_tritons": "its argument function is a builtins.function",
    "addresses_in_memory": "turns integers into pointers",
    "addresses_as_arguments": "its argument n is the address of something in this process",
    "hooks": "it has hooks that run before it",
    "the_launcher_of_a_compiled_kernel": "its launcher was called, which knows no source",
}


def launches(reader: CaptureReader) -> list[dict[str, Any]]:
    """The arguments of each launch, with the kernel's name as `kernel`."""
    found = []
    for ordinal in range(reader.record_count):
        record = reader.record(ordinal)
        if record.signature.kind is RecordKind.op:
            kernel = reader.kernels[record.signature.kernel]
            assert kernel is not None
            if kernel.kind is KernelKind.triton:
                names = [node.name for node in record.signature.args]
                found.append({"kernel": kernel.name, **dict(zip(names, record.args, strict=True))})
    return found


def attachment(reader: CaptureReader, kernel: Any, role: str) -> str:
    (found,) = [reader.attachments[number] for number in kernel.attachments if reader.attachments[number].role == role]
    return bytes(reader.payload(found.payload)).decode()


@pytest.mark.slow
def test_a_capture_does_not_change_what_a_program_computes(captures: tuple[Path, dict[str, Any]]) -> None:
    _, same = captures
    assert set(same) == set(WRITTEN) | set(REFUSED)
    # The second time there is nothing to tune.
    assert {name for name, value in same.items() if not value} == {"autotuned_without_care"}


@pytest.mark.parametrize("name", WRITTEN)
def test_launches_are_ops_that_say_what_they_write(captures: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, _ = captures
    with CaptureReader(folder / f"{name}.opreplay") as reader:
        assert reader.summary is not None and not reader.summary.unsupported
        found: dict[str, set[str]] = {}
        for kernel in reader.kernels:
            if kernel is not None and kernel.kind is KernelKind.triton:
                schema = parse_operator_schema(kernel.schema)
                assert (schema.name, schema.overload) == (kernel.name, kernel.overload)
                found[schema.base_name] = {each.name for each in schema.arguments if each.type.written}
                metadata = json.loads(attachment(reader, kernel, "metadata"))
                assert metadata["writes"] == "source" and metadata["target"] == "interpreter"
        assert found == WRITTEN[name]


def test_every_launch_is_one_op_with_its_values(captures: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = captures
    with CaptureReader(folder / "matmul.opreplay") as reader:
        (launch,) = launches(reader)
        assert [launch[name] for name in ("m", "n", "k", "M", "ACTIVATION", "grid")] == [20, 36, 24, 16, "relu", [2, 3]]
        assert (launch["c"].meta.sizes, launch["c"].meta.dtype.name) == ((20, 36), "float16")
    with CaptureReader(folder / "tuples_and_none.opreplay") as reader:
        first, second = launches(reader)
        assert (first["bias"], second["bias"].meta.sizes) == (None, (7,))
        assert (first["flag"], second["flag"], first["SHIFTS_1"]) == (True, False, 2)
        assert first["outs_1"].id == second["outs_1"].id
    with CaptureReader(folder / "names_that_launches_have.opreplay") as reader:
        (launch,) = launches(reader)
        assert (launch["grid"], launch["grid_2"], launch["num_stages"]) == (4, [3], 2)
    with CaptureReader(folder / "in_place.opreplay") as reader:
        assert len(launches(reader)) == 3


def test_of_an_autotuner_only_the_launch_with_the_chosen_configuration_is_recorded(
    captures: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = captures
    with CaptureReader(folder / "autotuned.opreplay") as reader:
        found = [(each["BLOCK"], each["grid"], each.get("num_warps"), each["value"]) for each in launches(reader)]
        assert found == [(32, [2], 8, 1.5), (32, [2], 8, 0.5), (32, [1], None, 3.0)]
        tuned = next(kernel for kernel in reader.kernels if kernel is not None and kernel.kind is KernelKind.triton)
        assert "BLOCK: 32, num_warps: 8" in json.loads(attachment(reader, tuned, "metadata"))["configuration"]


def test_of_an_autotuner_that_tries_in_its_own_way_too(captures: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = captures
    with CaptureReader(folder / "autotuned_by_a_class_of_its_own.opreplay") as reader:
        assert [(each["BLOCK"], each["grid"]) for each in launches(reader)] == [(8, [2])] * 2


def test_the_source_stands_alone_and_names_keep_their_meanings(captures: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = captures
    with CaptureReader(folder / "calling.opreplay") as reader:
        (kernel,) = [each for each in reader.kernels if each is not None and each.kind is KernelKind.triton]
        text = attachment(reader, kernel, "source")
    lines = text.splitlines()
    assert lines[:2] == ["import triton", "import triton.language as tl"]
    assert {"SCALE = tl.constexpr(3)", "SCALE_2 = tl.constexpr(5)", "ENDING = 2.5"} <= set(lines)
    assert "def into(out, at, value, mask):" in lines and "    put(out, at, values, at < n)" not in lines
    assert not [line for line in lines if "tests" in line]


def test_what_trial_launches_wrote_is_imported(captures: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = captures
    with CaptureReader(folder / "autotuned_without_care.opreplay") as reader:
        kinds = [record.signature.kind for record in map(reader.record, range(reader.record_count))]
        (launch,) = launches(reader)
        reasons = [
            reader.record(i).argument("reason") for i, kind in enumerate(kinds) if kind is RecordKind.storage_import
        ]
    assert launch["BLOCK"] == 16 and reasons == ["outside_write"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_down_is_one_record_that_says_why(
    captures: tuple[Path, dict[str, Any]], name: str
) -> None:
    folder, _ = captures
    with CaptureReader(folder / f"{name}.opreplay") as reader:
        assert reader.summary is not None and reader.summary.unsupported == {"triton_launch": 1}
        assert not launches(reader)
        texts = [
            {node.name: node.constant for node in signature.args}
            for signature in reader.signatures
            if signature is not None and signature.kind is RecordKind.unsupported
        ]
    op, detail = str(texts[0]["op"]), str(texts[0]["detail"])
    assert REFUSED[name] in detail
    assert ("_kernel" in op and "programs.py:" in detail) or op == "CudaLauncher"  # which is no kernel
