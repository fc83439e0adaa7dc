"""Inductor's autotuners of Triton kernels: which configuration one chooses, and what a launch of it gives the kernel.

Inductor compiles its Triton kernels itself, for arguments of which it knows some things at that time, and launches what
it compiled past the function that Triton decorated, by a launcher that computes the grid.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from replayfmt.pytorch.triton.compiled import specialization

_HEURISTICS = "torch._inductor.runtime.triton_heuristics"
_PASSED_ON = (bool, int, str)


class NotTold(Exception):
    """What an autotuner launches cannot be told. The text says why."""


@dataclass(frozen=True)
class TunedLaunch:
    """One launch. `function`: Triton's decorated one; `arguments` of its parameters, by name; `options` that it is
    compiled with. `compiled`: what is launched, None if Inductor kept its binary alone. `alike`: whether Triton would
    compile the same for a launch of the function with these arguments. `generated`: Inductor wrote the kernel, not the
    program."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    compiled: Any
    alike: bool
    generated: bool


def choose(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the configuration chosen, as the launch would. Raises NotTold, also for what the launch will raise: a
    compiler's or a device's error is the program's to see."""
    try:
        if len(tuner.launchers) == 0:
            tuner.precompile()
        if len(tuner.launchers) > 1 and not _plugins(tuner):
            tuner.autotune_to_one_config(*args, **kwargs)
        meta = tuner.inductor_meta
        if meta.get("combo_tuning_groups") and not getattr(tuner.launchers[0].config, "found_by_combo_autotune", False):
            tuner.launchers = [tuner._combo_sequential_autotune(tuner.launchers[0], *args, **kwargs)]
        if meta.get("coordinate_descent_tuning") and not getattr(tuner.launchers[0].config, "found_by_coordesc", False):
            tuner.launchers = [tuner.coordinate_descent_tuning(tuner.launchers[0], *args, **kwargs)]
        getattr(tuner, "_ensure_kernel_loaded", lambda: None)()
    except Exception as error:
        raise NotTold(f"its configuration could not be chosen: {type(error).__name__}: {error}") from error


def _plugins(tuner: Any) -> Any:
    """What may act in place of a launch; PyTorch before 2.12 has no such thing."""
    return getattr(tuner, "_plugins", ())


def launch_of(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TunedLaunch:
    """What a launch gives the kernel. Raises NotTold."""
    heuristics: Any = sys.modules[_HEURISTICS]
    if _plugins(tuner):
        raise NotTold("a plugin of its autotuner may do anything in place of a launch")
    (launcher,) = tuner.launchers
    code, config, function = launcher.__code__, launcher.config, tuner.fn
    given = {**dict(zip(code.co_varnames[: code.co_argcount - 1], args, strict=False)), **kwargs}
    result = next((each for each in tuner.compile_results if each.config is config), None)
    meta = tuner._create_compile_meta(config) if result is None else result.compile_meta
    known = {"num_warps": config.num_warps, "num_stages": config.num_stages, **config.kwargs, **meta["constants"]}
    missing = [name for name in function.arg_names if name not in given and name not in known]
    if missing:
        raise NotTold(f"its launcher does not say what its parameter {missing[0]} is")
    arguments = {name: given[name] if name in given else known[name] for name in function.arg_names}
    chosen = tuner._create_compile_options(config, meta)
    options = {name: value for name, value in chosen.items() if isinstance(value, _PASSED_ON) and name not in arguments}
    grid = heuristics.GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(dict(given))
    compiled = getattr(result, "kernel", None)
    if not hasattr(compiled, "asm") or not hasattr(compiled, "src"):
        compiled = None
    alike = compiled is not None and _alike(function, arguments, options, compiled)
    generated = tuner.heuristic_type is not heuristics.HeuristicType.USER_AUTOTUNE
    return TunedLaunch(function, arguments, options, tuple(grid), compiled, alike, generated)


def _alike(function: Any, arguments: dict[str, Any], options: dict[str, Any], compiled: Any) -> bool:
    import triton

    try:
        device = triton.runtime.driver.active.get_current_device()
        _kernels, _keys, _target, backend, binder = function.device_caches[device]
        bound, special, parsed = binder(**arguments, **options)
        _options, signature, constants, attrs = function._pack_args(backend, options, bound, special, parsed)
    except (AttributeError, KeyError, TypeError, ValueError):  # another version of Triton
        return False
    source = compiled.src
    return bool(
        specialization(signature, constants, attrs) == specialization(source.signature, source.constants, source.attrs)
    )
