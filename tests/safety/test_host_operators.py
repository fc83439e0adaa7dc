"""Operators that do more than compute on tensors: known by a walk over all that PyTorch registers, and never run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from failure.table import recorded
from format.reseal import rename_kernel
from in_process import Tools

from replayfmt.errors import ReplayRefused, UsageError
from replayfmt.export.replay_zip import export_replay_zip
from replayfmt.format.codes import KernelKind
from replayfmt.format.model import Kernel
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.results import infer
from replayfmt.pytorch.operators import COMPUTING, acts_outside
from replayfmt.pytorch.overloads import find_overload
from replayfmt.replay.plan import Plan
from replayfmt.replay.resolution.kernel_lookup import resolve

HOST_CALLS = [
    "aten::from_file",
    "aten::_print",
    "debugprims::load_tensor",
    "mkldnn::data_ptr",
    "inductor::_reinterpret_tensor",
    "inductor::_alloc_from_pool",
    "profiler::_record_function_enter",
    "export::access_subclass_inner_tensor",
    "static_runtime::dict_unpack",
    "c10d::send",
    "_c10d_functional::isend",
    "symm_mem::memset32_",
    "prim::Print",
    "inductor::resize_storage_bytes_",
    "aten::get_gradients",
    "aten::_cufft_set_plan_cache_max_size",
]
# What a walk over the registry finds of operators that return no tensor and write none: each of them only looks at its
# arguments, or makes packed weights. A new one has somebody look at it.
# fmt: off
LOOKING = {
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_backward", "_choose_qparams_per_tensor",
    "_cslt_sparse_mm_search", "_cufft_get_plan_cache_max_size", "_cufft_get_plan_cache_size",
    "_debug_has_internal_overlap", "_dimI", "_dimV", "_fused_sdp_choice", "_get_mkldnn_serialized_md",
    "_has_compatible_shallow_copy_type", "_has_same_storage_numel", "_is_mkldnn_acl_supported",
    "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported", "_is_zerotensor", "_linalg_check_errors",
    "_local_scalar_dense", "_nbytes", "_nested_get_ragged_idx", "_nested_tensor_from_mask_left_aligned",
    "_nnpack_available", "_nnz", "_propagate_xla_data", "_sink_tokens", "_use_cudnn_ctc_loss",
    "_use_cudnn_rnn_flatten_weight", "_use_miopen_ctc_loss", "_validate_compressed_sparse_indices",
    "_validate_sparse_bsc_tensor_args", "_validate_sparse_bsr_tensor_args",
    "_validate_sparse_compressed_tensor_args", "_validate_sparse_coo_tensor_args",
    "_validate_sparse_csc_tensor_args", "_validate_sparse_csr_tensor_args", "_version", "allclose", "archs_topk",
    "can_cast", "covers_topk", "cudnn_is_acceptable", "current_device", "current_device_index", "dense_dim",
    "device", "dim", "equal", "get_device", "is_coalesced", "is_complex", "is_conj", "is_contiguous",
    "is_distributed", "is_floating_point", "is_inference", "is_leaf", "is_neg", "is_non_overlapping_and_dense",
    "is_nonzero", "is_pinned", "is_same_size", "is_set_to", "is_signed", "is_sparse", "is_vulkan_available", "item",
    "layout", "maximum_value", "minimum_value", "numel", "output_nr", "promote_types", "q_per_channel_axis",
    "q_scale", "q_zero_point", "qscheme", "record_grad_output_stream",
    "result_type", "retains_grad", "size", "sparse_dim", "storage_offset",
    "stride", "sym_constrain_range", "sym_constrain_range_for_size", "sym_is_contiguous",
    "sym_is_non_overlapping_and_dense", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride",
}
# fmt: on
PACKED = (
    "prepack",
    "make_quantized_cell_params",
    "_unpack_sizes",
    "_stride",
    "_padding",
    "_dilation",
    "_groups",
    "_transpose",
    "_output_padding",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("source"), lambda: torch.ones(3).exp())


def _named(source: Path, folder: Path, name: str) -> Path:
    path = folder / "hostile.opreplay"
    path.write_bytes(source.read_bytes())
    rename_kernel(path, "aten::exp", name=name)
    return path


@pytest.mark.guarantee("host-operators")
@pytest.mark.parametrize("name", HOST_CALLS)
def test_operators_that_act_on_the_host_are_never_run(source: Path, tmp_path: Path, name: str) -> None:
    """They are registered, take strings or addresses, and would read files, print, send or look up attributes."""
    path = _named(source, tmp_path, name)
    with pytest.raises(ReplayRefused) as refused:
        Plan(path)
    (finding,) = refused.value.findings
    assert "not replayed" in finding
    if "collective" not in finding:
        assert f"unless --allow-operator={name} allows it" in finding
    with Plan(path, keep_going=True) as plan:
        assert plan.execute(keep_going=True).totals()["refused"] == 1


def test_what_is_allowed_by_name_runs_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`aten::_print` prints; the same capture without leave does not."""
    source = recorded(tmp_path, lambda: torch.ops.aten._print.default("opreplay was here"))
    capfd.readouterr()
    for allowed in ((), ("aten::from_file",)):
        with pytest.raises(ReplayRefused) as refused:
            Plan(source, allow_operators=allowed)
        assert "--allow-operator=aten::_print" in refused.value.findings[0]
    with Plan(source, allow_operators=["aten::_print"]) as plan:
        plan.execute()
    assert capfd.readouterr().out.strip() == "opreplay was here"
    for wrong in ("aten::exp", "", "from_file", "aten::*", "nowhere::x"):
        with pytest.raises(UsageError, match="--allow-operator="):
            Plan(source, allow_operators=[wrong])


def test_the_flag_of_the_tools_is_that_leave(source: Path, tmp_path: Path, tools: Tools) -> None:
    path = _named(source, tmp_path, "aten::_print")
    assert "--allow-operator=aten::_print" in tools("run", path).err
    done = tools("run", "--allow-operator=aten::_print", path)
    assert done.code == 1 and "aten::_print.default changed" in done.err, "it is looked up now"
    assert tools("run", "--allow-operator=aten::exp", path).code == 2


def test_an_import_tries_no_such_operator(capfd: pytest.CaptureFixture[str]) -> None:
    schema = torch.ops.aten._print.default._schema
    capfd.readouterr()
    infer(schema, [("s", "opreplay was here")])
    from_file = torch.ops.aten.from_file.default._schema
    assert "opens or creates files" in infer(from_file, [("filename", "/etc/passwd"), ("size", 4)]).unknown
    assert capfd.readouterr().out == ""


@pytest.mark.guarantee("host-operators")
def test_an_exported_script_runs_no_such_operator(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_capture(source) as reader:
        export_replay_zip(reader, tmp_path / "calls.zip")
    with zipfile.ZipFile(tmp_path / "calls.zip") as archive:
        code = compile(archive.read("replay.py"), "replay.py", "exec")
    names = {"__name__": "replay", "__file__": str(tmp_path / "replay.py")}
    exec(code, names)
    for name in HOST_CALLS:
        (tmp_path / "event_replay_ir.json").write_text(
            json.dumps([{"op_name": name, "replay_ir": {"list_pos_args": [], "list_kwargs": []}}])
        )
        capfd.readouterr()
        assert names["main"]([]) == 1  # type: ignore[operator]
        assert "does more than compute on tensors" in capfd.readouterr().out


@pytest.mark.guarantee("host-operators")
@pytest.mark.slow
def test_every_namespace_that_pytorch_registers_is_known() -> None:
    """A torch that brings another one has somebody look at it. (Tests register more, whose names say so.)"""
    script = "import torch; print(*{name.partition('::')[0] for name in torch._C._dispatch_get_all_op_names()})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "aten" in found
    assert {each for each in found if each not in COMPUTING and acts_outside(f"{each}::any") is None} == set()


@pytest.mark.guarantee("host-operators")
def test_every_operator_that_might_do_more_than_compute_is_known() -> None:
    """Those that neither return nor write a tensor, and those that take streams, futures or the like."""
    unknown = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        namespace, _, base = name.partition("::")
        if namespace not in COMPUTING or namespace == "_test" or acts_outside(name):
            continue
        found = find_overload(name, overload or "default")
        assert found is not None
        schema = found._schema
        gives = any("Tensor" in str(each.type) for each in schema.returns) or any(
            each.alias_info is not None and each.alias_info.is_write for each in schema.arguments
        )
        odd = {str(each.type) for each in (*schema.arguments, *schema.returns)} & {"Stream", "Any", "Future(Any)"}
        if odd and name != "aten::record_stream" and not re.search("unpack.*_sizes", base):
            unknown.add(full)
        if name == "inductor::accumulate_grad_":
            continue  # PyTorch 2.11 adds to the gradient of the first argument
        if namespace == "opreplay":
            continue  # our own: a launch does nothing, or what the replay of all ranks was asked for
        if not gives and base not in LOOKING and not any(part in base for part in PACKED):
            unknown.add(full)
    assert unknown == set()


@pytest.mark.guarantee("host-operators")
def test_every_operator_of_this_torch_that_takes_a_path_or_a_name_of_something_is_known() -> None:
    """A torch that brings another operator with a string has somebody look at it."""
    harmless = (
        "norm",
        "rounding_mode",
        "reduce",
        "reduce_op",
        "red_op",
        "approximate",
        "UPLO",
        "driver",
        "ord",
        "mode",
        "indexing",
        "side",
        "interpolation",
        "pad_mode",
        "padding",
        "equation",
        "activation",
        "algorithm",
        "attr",
        "assert_msg",
        "api_name",
        "unary_attr",
        "binary_attr",
        "unary_algorithm",
        "output_dtype",
        "post_op_name",
        "post_op_algorithm",
        "unary_post_op",
        "binary_post_op",
        "unary_post_op_algorithm",
        "padding_mode",
        "upscale_mode",
        "p",
        "padding_side",
    )
    unknown = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        for each in torch._C._jit_get_schemas_for_operator(name):
            if (each.overload_name or "") != overload or not name.startswith(
                ("aten::", "prims::", "quantized::", "mkldnn::", "onednn::", "inductor::")
            ):
                continue
            strings = [argument.name for argument in each.arguments if "str" in str(argument.type).split("[")[0]]
            if re.search("[Dd]imname|name[sd]", overload) and all("dim" in argument for argument in strings):
                continue  # a dimension by its name, which tensors have until PyTorch 2.11
            if set(strings) - set(harmless):
                kernel = Kernel(name, overload or "default", str(each), KernelKind.operator)
                if not isinstance(resolve(kernel, None), str):
                    unknown.add((full, tuple(strings)))
    assert {each for each in unknown if not each[0].startswith("aten::_test")} == set()


@pytest.mark.guarantee("no-imports")
@pytest.mark.slow
def test_a_replay_imports_no_optional_module_of_pytorchs_because_a_capture_names_it(
    source: Path, tmp_path: Path
) -> None:
    """In a process of its own, where nothing has imported them: with leave, and only that one."""
    path = _named(source, tmp_path, "fsdp::chunk_cat")
    script = (
        "import sys, torch, replayfmt.replay.plan as plan\nfrom replayfmt.errors import ReplayRefused\n"
        "before = set(sys.modules)\n"
        "for allowed in ([], ['fsdp']):\n"
        "    try: plan.Plan(sys.argv[1], allow_imports=allowed)\n"
        "    except ReplayRefused as refused: print(refused.findings[0])\n"
        "    print(any('fsdp' in each or 'inductor' in each for each in set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True, timeout=600)
    refused, imported, changed, after = done.stdout.splitlines()
    assert "--allow-import=fsdp lets it be imported" in refused and imported == "False"
    assert "fsdp::chunk_cat.default" in changed and "does not exist" not in changed and after == "True"
