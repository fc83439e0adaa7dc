"""The headings of options in --help. One flag has the same heading in every tool."""

from __future__ import annotations

from collections.abc import Iterable

import click

# fmt: off
GROUPS: dict[str, tuple[str, ...]] = {
    "Output": (
        "--output", "--force", "--format", "--jq", "--raw-output", "--slurp", "--verbose", "--report",
        "--benchmark-format", "--benchmark-out", "--plots", "--no-picture",
    ),
    "Selection": (
        "--ops", "--scope", "--kernel", "--signature", "--unique", "--partial", "--summary", "--signatures",
        "--values", "--kernel-skeleton", "--attachment", "--start-op", "--stop-op", "--start-scope", "--stop-scope",
        "--step", "--steps", "--time", "--replay-scope", "--op-filter", "--op-limit", "--op-instances",
        "--group-by", "--top",
        "--rank",
        "--section", "--tensors", "--predict", "--tool", "--launch", "--launches", "--records", "--max-bytes",
        "--target", "--reads-unwritten", "--children", "--device-kernels", "--table", "--replayed", "--power-log",
    ),
    "Scopes": ("--mark", "--module-scopes"),
    "Content": (
        "--payload", "--redact", "--no-sources", "--file", "--file-policy", "--file-validation", "--replay-file-remap",
        "--replay-initializer", "--list-initializers", "--moe-routing", "--script", "--script-data", "--vectors",
        "--recover", "--add-digests",
    ),
    "Operators and kernels": (
        "--replay-kernel-substitution", "--substitution-rtol", "--substitution-atol", "--op-library", "--inside",
        "--whole", "--compiled", "--native", "--recorder", "--from", "--level", "--rewrite", "--op-alias",
        "--string-default", "--number-default", "--graph-capture",
    ),
    "Devices": ("--device", "--streams", "--graphs"),
    "Verification": (
        "--verify", "--run", "--digests", "--audit", "--opaque-result", "--capture", "--keep-going",
        "--compare-kernels",
    ),
    "Measurement": (
        "--min-samples",
        "--benchmark-min-time", "--benchmark-precision", "--benchmark-max-time", "--inputs", "--benchmark-warmup",
        "--benchmark-repetitions", "--warm", "--compare", "--benchmark", "--probes", "--baseline", "--fail-above",
        "--noise-floor", "--energy", "--energy-source", "--energy-out", "--power-log-out", "--energy-windows",
        "--power-interval", "--power-averaging", "--zone", "--gpu", "--clock-offset", "--reconcile", "--program",
        "--program-runs", "--memory", "--per-op", "--cuda-graph", "--roofline", "--peak-flops",
        "--peak-bandwidth", "--stop-on-error", "--device-profiling-mode", "--device-profiling-output",
    ),
    "Permissions": ("--allow-operator", "--allow-import", "--allow-code", "--allow-incomplete", "--isolate"),
    "Help": ("--help", "--version", "--agents-md"),
}
# fmt: on
_OTHERS = "Options"


def groups(parameters: Iterable[click.Parameter]) -> list[tuple[str, list[click.Parameter]]]:
    """The options among a command's parameters, under their headings."""
    headings = {name: heading for heading, names in GROUPS.items() for name in names}
    found: dict[str, list[click.Parameter]] = {_OTHERS: [], **{heading: [] for heading in GROUPS}}
    for parameter in parameters:
        if isinstance(parameter, click.Option):
            found[headings.get(max(parameter.opts, key=len), _OTHERS)].append(parameter)
    return [(heading, options) for heading, options in found.items() if options]
