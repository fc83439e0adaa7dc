"""Probes in PTX: what is parsed, what is put in and where, and that ptxas assembles it for the kernel's own target."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from replayfmt.errors import LibraryMissing
from replayfmt.probes import ptx as ptx_module
from replayfmt.probes.definitions import ProbeDefinition, parse_probe, shipped_probes
from replayfmt.probes.ptx import (
    PtxError,
    PtxModule,
    accessed_bytes,
    assemble,
    parse_ptx,
    position_of,
    probed_ptx,
    ptxas_programs,
)

from .kernels import ARCHITECTURES, BY_HAND, CUDA_KERNELS, TRITON_KERNELS, nvcc_ptx, ptx, triton_ptx
from .test_definitions import MINE

PROBES = {probe.name: probe for probe in shipped_probes()}
ALL = [
    *((f"{name}_sm{architecture}", None) for name in TRITON_KERNELS for architecture in ARCHITECTURES),
    *(("cuda", name) for name in CUDA_KERNELS),
    *((name, None) for name in BY_HAND),
]
needs_ptxas = pytest.mark.skipif(not ptxas_programs(), reason="no ptxas")


def module_of(file: str) -> PtxModule:
    return parse_ptx(ptx(file))


def sites(module: PtxModule, entry: str | None) -> Counter[str]:
    found = Counter(map(position_of, module.entry(entry).instructions))
    return Counter({name: count for name, count in found.items() if name})


@pytest.mark.parametrize(("file", "entry"), ALL)
def test_taking_a_probe_out_again_gives_the_kernel_back(file: str, entry: str | None) -> None:
    """Every character of the kernel is still there, in its order; a probe adds whole lines and two parameters."""
    module = module_of(file)
    for probe in PROBES.values():
        try:
            text = probed_ptx(module, entry, probe).text
        except PtxError as error:
            assert "the kernel has none" in str(error)
            continue
        place = 0
        for line in module.text.splitlines():
            bare = line.strip().rstrip(",)")
            found = text.find(bare, place)
            assert found >= 0, (probe.name, line)
            place = found + len(bare)
        assert text.count(".loc") == module.text.count(".loc") and "probe_records" in text


@pytest.mark.parametrize(("file", "entry"), ALL)
def test_a_probe_is_at_every_place_that_it_names(file: str, entry: str | None) -> None:
    module = module_of(file)
    there = sites(module, entry)
    found = probed_ptx(module, entry, PROBES["gmem_bytes"])
    for position in ("global_load", "global_store", "async_copy", "end"):
        assert found.sites.get(position, 0) == there[position], position
    assert probed_ptx(module, entry, PROBES["block_sched"]).sites == {"start": 1, "end": there["end"]}


def test_positions_are_those_of_the_kernels() -> None:
    assert sites(module_of("triton_matmul_sm80"), None)["async_copy"] >= 4
    assert sites(module_of("triton_matmul_sm80"), None)["matrix"] == 8
    assert sites(module_of("predicated_return"), None) == {"global_store": 1, "end": 2}
    assert sites(module_of("cuda"), "cuda_collatz")["branch"] >= 2


@pytest.mark.parametrize(
    ("instruction", "position", "accessed"),
    [
        ("ld.global.b32 %r1, [%rd1];", "global_load", "4"),
        ("ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1+16];", "global_load", "16"),
        ("ld.global.v2.b64 {%rd1, %rd2}, [%rd3];", "global_load", "16"),
        ("ld.volatile.global.u8 %rs1, [%rd1];", "global_load", "1"),
        ("st.global.L1::no_allocate.b16 [%rd1], %rs1;", "global_store", "2"),
        ("st.global.b128 [%rd1], %rq1;", "global_store", "16"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "async_copy", "16"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 0x10, %r7;", "async_copy", "%r7"),
        ("cp.async.ca.shared.global.L2::cache_hint [%r1], [%rd1], 8, %rd9;", "async_copy", "8"),
        ("cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %r5, %rd9;", "async_copy", "%r5"),
        ("cp.async.commit_group;", None, None),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3];", None, None),
        ("ld.shared.b32 %r1, [%r2];", None, None),
        ("ld.param.u64 %rd1, [k_param_0];", None, None),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;", "matrix", None),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f1};", "matrix", None),
        ("exit;", "end", None),
        ("brx.idx %r1, $table;", "branch", None),
    ],
)
def test_an_instructions_position_and_bytes(instruction: str, position: str | None, accessed: str | None) -> None:
    module = parse_ptx(ptx("predicated_return").replace("\tadd.u32 %r3, %r2, %r2;", f"\t{instruction}"))
    found = module.entry().instructions[5 + 1]
    assert position_of(found) == position
    if accessed is not None:
        assert accessed_bytes(found) == accessed


def test_a_guard_is_the_probes_guard_too() -> None:
    text = probed_ptx(module_of("predicated_return"), None, PROBES["block_sched"]).text
    (inserted,) = re.findall(r"setp\.eq\.and\.u32 %opreplay_saves, %opreplay_u0, 0, !%p1;", text)
    assert inserted and text.count("@!%p1 mov.u64 %opreplay_r_now, %clock64;") == 1
    assert text.index("@%opreplay_saves st.global.u64 [%opreplay_row+0]") < text.index("@!%p1 ret;")


def test_an_address_is_taken_before_its_register_is_overwritten() -> None:
    text = probed_ptx(module_of("overwritten_address"), None, PROBES["dmat"]).text
    for offset, load in ((8, "ld.global.u64 %rd1, [%rd1+8];"), (-16, "ld.global.v4.u32 {")):
        assert text.index(f"add.s64 %opreplay_address, %rd1, {offset};") < text.index(load)


def test_a_probe_after_an_instruction_comes_after_it() -> None:
    after = parse_probe(MINE.replace('at = ["global_store"]', 'at = ["global_store"]\nwhen = "after"'), "mine.toml")
    text = probed_ptx(module_of("predicated_return"), None, after).text
    assert text.index("st.global.u32 [%rd3], %r3;") < text.index("add.u64 %opreplay_r_count")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "int main() {}", "expected .version and .target; this is not PTX"),
        (lambda text: text.replace(".address_size 64", ".address_size 32"), "expected .address_size 64"),
        (lambda text: text.replace(".entry", ".func"), "expected an entry function (.entry), got none"),
        (lambda text: text.rstrip().rstrip("}"), "line 10: expected a brace that closes this body, got the end"),
        (lambda text: text.replace("ret;\n}", "ret\n}"), "expected a semicolon after"),
        (lambda text: text.replace("add.u32 %r3", "+ %r3"), "line 20: expected an instruction, got '+ %r3"),
        (lambda text: text.replace("ret;", "trap;"), "predicated_return: expected a return (ret or exit), got none"),
        (lambda text: text + "// %opreplay_row", "it holds one already"),
        (lambda text: text.replace("\t.param .u32", "\tparam .u32"), "line 6: expected .param TYPE NAME"),
    ],
)
def test_what_cannot_be_probed_is_one_error(change, message: str) -> None:
    with pytest.raises(PtxError) as raised:
        probed_ptx(parse_ptx(change(ptx("predicated_return"))), None, PROBES["block_sched"])
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_kernel_is_chosen_by_name_where_there_are_several() -> None:
    with pytest.raises(PtxError, match="expected one entry function, or its name, got cuda_fill|cuda_"):
        module_of("cuda").entry()
    with pytest.raises(PtxError, match="expected an entry function other, got"):
        module_of("cuda").entry("other")
    assert module_of("cuda").entry("cuda_saxpy").name == "cuda_saxpy"


def test_a_probe_that_would_save_nothing_is_refused() -> None:
    with pytest.raises(PtxError, match="triton_add: probe progress saves at branch; the kernel has none"):
        probed_ptx(module_of("triton_add_sm80"), None, PROBES["progress"])


def test_comments_and_text_do_not_look_like_code() -> None:
    hidden = ptx("predicated_return").replace(
        "\tadd.u32 %r3",
        '\t/* st.global.u32 [%rd3], %r3; ret; } */ // ret; {\n\t.pragma "nounroll; ret;";\n\tadd.u32 %r3',
    )
    assert sites(parse_ptx(hidden), None) == {"global_store": 1, "end": 2}


def assembled(module: PtxModule, entry: str | None, probe: ProbeDefinition, most_more: int = 8) -> None:
    """`most_more`: registers that counting may take beside those of saving."""
    try:
        found = probed_ptx(module, entry, probe)
    except PtxError as error:
        assert "the kernel has none" in str(error)
        return
    figures = assemble(found.text).figures[found.entry]
    assert figures.registers and figures.registers < 255 and figures.spill_stores_bytes == 0
    if probe.each_site:
        counted = assemble(probed_ptx(module, entry, probe, counting=True).text)
        assert (counted.figures[found.entry].registers or 0) <= figures.registers + most_more


@pytest.mark.slow
@needs_ptxas
@pytest.mark.parametrize(("file", "entry"), ALL)
def test_every_kernel_with_every_probe_assembles_for_its_target(file: str, entry: str | None) -> None:
    for probe in PROBES.values():
        assembled(module_of(file), entry, probe)


@pytest.mark.slow
@needs_ptxas
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_installed_triton_compiles_assembles_with_a_probe(
    architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    most_more = 16 if triton.__version__.startswith("3.6.") else 8  # whose ptxas takes ten more for Hopper
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in TRITON_KERNELS:
        module = parse_ptx(triton_ptx(name, architecture))
        assert ".section" in module.text  # of debug data
        assembled(module, name, PROBES["dmat"], most_more)


@pytest.mark.slow
@needs_ptxas
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_what_the_installed_nvcc_compiles_assembles_with_a_probe() -> None:
    module = parse_ptx(nvcc_ptx())
    for name in CUDA_KERNELS:
        assembled(module, name, PROBES["block_sched"])


def disassembler() -> str | None:
    if found := shutil.which("nvdisasm"):
        return found
    beside = [Path(ptxas).with_name("nvdisasm") for ptxas in ptxas_programs()]
    return next((str(path) for path in beside if path.is_file()), None)


@pytest.mark.slow
@needs_ptxas
@pytest.mark.skipif(disassembler() is None, reason="no nvdisasm")
@pytest.mark.parametrize(
    ("file", "entry"), [("triton_add_sm80", None), ("triton_row_sum_sm80", None), ("cuda", "cuda_saxpy")]
)
def test_the_machine_code_reads_the_clock_once_at_each_site(file: str, entry: str | None, tmp_path: Path) -> None:
    found = probed_ptx(module_of(file), entry, PROBES["block_sched"])
    (tmp_path / "a.cubin").write_bytes(assemble(found.text).cubin)
    command = [str(disassembler()), str(tmp_path / "a.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    sections = re.split(r"^\s*\.section\s+\.text\.", code, flags=re.MULTILINE)
    (body,) = [section for section in sections if section.startswith(found.entry)]
    assert len(re.findall(r"\bSR_CLOCKLO\b", body)) == sum(found.sites.values())
    assert len(re.findall(r"\bSR_VIRTUALSMID\b|\bSR_VIRTID\b|\bSR_SMID\b", body)) == found.sites["end"]


@needs_ptxas
def test_what_ptxas_refuses_is_one_error() -> None:
    with pytest.raises(PtxError, match="ptxas does not assemble it for sm_80: .*error"):
        assemble(ptx("predicated_return").replace("add.u32 %r3", "add.u32 %undeclared"))


def test_without_ptxas_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx_module, "ptxas_programs", lambda: ())
    with pytest.raises(LibraryMissing, match="needs ptxas: install CUDA and set CUDA_HOME, or pip install triton"):
        assemble(ptx("predicated_return"))
