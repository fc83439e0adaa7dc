"""A kernel task in the forms of other benchmarks of kernels, beside its own files.

flashinfer-bench: definitions, workloads and a first solution, as its package reads them (`definitions/`, `workloads/`,
`solutions/`, with contents in `blob/`). KernelBench: a file for each workload with `Model`, `get_inputs` and
`get_init_inputs` (`kernelbench/`). Neither can say that an argument is written, or that arguments share memory: such
tasks are refused.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import torch

from replayfmt.benchmark.candidates.task_calls import memories_of
from replayfmt.benchmark.candidates.task_cases import Arguments, Case
from replayfmt.errors import ReplayRefused
from replayfmt.pytorch.tensors.memory import DTYPE_CODE, row_major_bytes
from replayfmt.trim.vectors import Array, write_safetensors

Form = Literal["flashinfer-bench", "kernelbench"]
_DTYPES = [
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
]  # that flashinfer-bench has
_SCALARS = {bool: "bool", int: "int64", float: "float32"}
_AUTHOR = "captured"


def write_form(folder: Path, out: Path, task: dict[str, Any], reference: str, form: Form) -> None:
    """Write the files of a form into a task's folder, which will be `out`. Raises ReplayRefused for what it cannot
    express."""
    for workload in task["workloads"]:
        for why, there in (
            ("an argument is written", workload["written"]),
            ("arguments share memory", workload["shared_memory"]),
        ):
            if there:
                raise ReplayRefused(f"{task['name']}: {workload['name']}: {why}, which {form} cannot say")
        if any(
            isinstance(value, list) and any(isinstance(each, dict) for each in value)
            for value in workload["arguments"].values()
        ):
            raise ReplayRefused(
                f"{task['name']}: {workload['name']}: a list of tensors is an argument, which {form} cannot say"
            )
    if form == "kernelbench":
        for workload in task["workloads"]:
            _kernelbench(folder, out, task, workload, reference)
        return
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for workload in task["workloads"]:
        groups[json.dumps(_structure(workload))].append(workload)
    for number, workloads in enumerate(groups.values()):
        try:
            _flashinfer(folder, task, workloads, reference, number)
        except _NoCommonAxes:
            for place, each in enumerate(workloads):
                _flashinfer(folder, task, [each], reference, number * 1000 + place)


class _NoCommonAxes(Exception):
    """An output has a size that varies, and no input has it."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "storage" in value


def _structure(workload: dict[str, Any]) -> Any:
    """What workloads of one definition have in common: all but sizes, and numbers that are inputs."""
    found: dict[str, Any] = {}
    for name, value in workload["arguments"].items():
        if _is_tensor(value):
            found[name] = [value["dtype"], len(value["sizes"])]
        else:
            found[name] = type(value).__name__ if type(value) in _SCALARS else value
    results = [[each.get("dtype"), len(each.get("sizes", ()))] for each in workload["results"]]
    return [workload["program"], found, results]


def _inputs(workload: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are inputs; the others are constants of the definition."""
    return {
        name: value for name, value in workload["arguments"].items() if _is_tensor(value) or type(value) in _SCALARS
    }


def _call(task: dict[str, Any], workload: dict[str, Any], constants: dict[str, Any]) -> str:
    """The expression that calls the original with variables named like its arguments."""
    parts = []
    for name in workload["arguments"]:
        text = _literal(constants[name]) if name in constants else _variable(name)
        parts.append(f"{name}={text}" if name in workload["keyword_only"] else text)
    return f"PROGRAMS[{workload['program']}]({', '.join(parts)})"


def _variable(name: str) -> str:
    return f"{name}_" if name in ("from", "self", "in", "is", "lambda") else name


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        if "$torch" in value:
            return f"torch.{value['$torch']}"
        if "$device" in value:
            return f"torch.device({value['$device']!a})"
        if "$float" in value:
            return f"float({value['$float']!a})"
        return f"complex({', '.join(f'float({str(each)!a})' for each in value['$complex'])})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return ascii(value)


def _tensors(folder: Path, task: dict[str, Any], workload: dict[str, Any], number: int) -> list[Array]:
    """The tensors of a case, in row-major order."""
    case = Case(folder, task, workload, number, None)
    found = Arguments(case, memories_of(case, case.contents))
    names = [name for name in workload["arguments"] if name not in workload["keyword_only"]]
    given = {**dict(zip(names, found.positional, strict=True)), **found.named}
    return [
        Array(_variable(name), row_major_bytes(value), DTYPE_CODE[value.dtype], tuple(value.shape))
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    ]


def _flashinfer(
    folder: Path, task: dict[str, Any], workloads: list[dict[str, Any]], reference: str, number: int
) -> None:
    first = workloads[0]
    base = re.sub(r"\W+", "_", task["name"]).strip("_")
    name = base if not number else f"{base}_{number}"
    kind = re.sub(r"\W+", "_", task["function"])
    axes: dict[tuple[int, ...], str] = {}
    inputs: dict[str, Any] = {}
    for argument, value in _inputs(first).items():
        if _is_tensor(value):
            shape = [
                _axis(axes, tuple(each["arguments"][argument]["sizes"][place] for each in workloads))
                for place in range(len(value["sizes"]))
            ]
            inputs[_variable(argument)] = {"shape": shape, "dtype": _dtype(task, value["dtype"])}
        else:
            inputs[_variable(argument)] = {"shape": None, "dtype": _SCALARS[type(value)]}
    bound = set(axes)
    outputs: dict[str, Any] = {}
    for place, result in enumerate(first["results"]):
        if "dtype" not in result:
            raise ReplayRefused(f"{task['name']}: a result is a {result['type']}, which flashinfer-bench cannot say")
        sizes = [tuple(each["results"][place]["sizes"][at] for each in workloads) for at in range(len(result["sizes"]))]
        if any(len(set(each)) > 1 and each not in bound for each in sizes):
            raise _NoCommonAxes
        shape = [_axis(axes, each) for each in sizes]
        outputs[f"output_{place}"] = {"shape": shape, "dtype": _dtype(task, result["dtype"])}
    constants = {key: value for key, value in first["arguments"].items() if key not in _inputs(first)}
    source = f"{reference}\n\ndef run({', '.join(inputs)}):\n    return {_call(task, first, constants)}\n"
    definition = {
        "name": name,
        "op_type": kind,
        "description": task["schema"] or ", ".join(task["operators"]),
        "axes": {
            axis: {"type": "var"} if len(set(sizes)) > 1 else {"type": "const", "value": sizes[0]}
            for sizes, axis in axes.items()
        },
        "inputs": inputs,
        "outputs": outputs,
        "reference": source,
        "tags": ["status:verified"] if task["inputs"] == "captured" else [],
    }
    solution = {
        "name": f"{name}_reference",
        "definition": name,
        "author": _AUTHOR,
        "spec": {
            "language": "triton" if task["kind"] == "triton" else "python",
            "target_hardware": sorted({each["device"].partition(":")[0] for each in first["storages"]}) or ["cpu"],
            "entry_point": "main.py::run",
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }
    lines = []
    for place, workload in enumerate(workloads):
        values = {axis: sizes[place] for sizes, axis in axes.items() if len(set(sizes)) > 1}
        for case in range(max(len(workload["cases"]), 1)):
            blob = f"blob/{name}/{workload['name']}.{case}.safetensors"
            given: dict[str, Any] = {}
            for argument, value in _inputs(workload).items():
                if not _is_tensor(value):
                    given[_variable(argument)] = {"type": "scalar", "value": value}
                elif workload["cases"]:
                    key = _variable(argument)
                    given[key] = {"type": "safetensors", "path": blob, "tensor_key": key}
                else:
                    given[_variable(argument)] = {"type": "random"}
            if workload["cases"]:
                _made(folder / blob)
                write_safetensors(folder / blob, _tensors(folder, task, workload, case))
            entry = {"axes": values, "inputs": given, "uuid": f"{task['capture_session']}-{workload['name']}-{case}"}
            lines.append(json.dumps({"definition": name, "workload": entry, "solution": None, "evaluation": None}))
    _made(folder / "definitions" / kind / f"{name}.json").write_text(json.dumps(definition, indent=1) + "\n")
    _made(folder / "workloads" / kind / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "solutions" / _AUTHOR / kind / name / f"{solution['name']}.json"
    _made(path).write_text(json.dumps(solution, indent=1) + "\n")


def _axis(axes: dict[tuple[int, ...], str], sizes: tuple[int, ...]) -> str:
    """The axis whose size in each workload is that."""
    return axes.setdefault(sizes, f"n{len(axes)}")


def _dtype(task: dict[str, Any], dtype: str) -> str:
    if dtype not in _DTYPES:
        raise ReplayRefused(f"{task['name']}: flashinfer-bench has no dtype {dtype}; it has {', '.join(_DTYPES)}")
    return dtype


def _made(path: Path) -> Path:
    """The path, whose folder is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


_LOADING = '''

def _load(name):
    """A tensor of the safetensors file beside this one; KernelBench runs the text of this file, not the file."""
    with open(Path(globals().get("__file__", WRITTEN)).with_suffix(".safetensors"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        first, end = header[name]["data_offsets"]
        file.seek(begin + first)
        return torch.frombuffer(bytearray(file.read(end - first)) or bytearray(1), dtype=torch.uint8)[: end - first]


def _tensor(name, dtype, sizes, strides, device):
    tensor = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    once = [size if stride else 1 for size, stride in zip(sizes, strides)]
    content = _load(name).view(dtype).reshape(sizes)
    for place, size in enumerate(once):
        content = content.narrow(place, 0, min(size, content.shape[place]))
    tensor.as_strided(once, strides).copy_(content)
    return tensor
'''


def _kernelbench(folder: Path, out: Path, task: dict[str, Any], workload: dict[str, Any], reference: str) -> None:
    name = Path("kernelbench", f"{workload['name']}.py")
    tensors = {name: value for name, value in workload["arguments"].items() if _is_tensor(value)}
    constants = {name: value for name, value in workload["arguments"].items() if name not in tensors}
    made = [
        f"_tensor({_variable(name)!a}, torch.{value['dtype']}, {value['sizes']}, {value['strides']}, "
        f"{workload['storages'][value['storage']]['device']!a})"
        for name, value in tensors.items()
    ]
    lines = [
        reference.rstrip(),
        "",
        "import json",
        "from pathlib import Path",
        "",
        f"WRITTEN = {str(out / name)!a}",
        _LOADING,
        "",
        "class Model(torch.nn.Module):",
        f'    """{workload["calls"]} calls of the captured program."""',
        "",
        f"    def forward(_, {', '.join(map(_variable, tensors))}):",
        f"        return {_call(task, workload, constants)}",
        "",
        "",
        "def get_inputs():",
        f"    return [{', '.join(made)}]",
        "",
        "",
        "def get_init_inputs():",
        "    return []",
        "",
    ]
    path = _made(folder / name)
    path.write_text("\n".join(lines), encoding="utf-8")
    write_safetensors(path.with_suffix(".safetensors"), _tensors(folder, task, workload, 0))
