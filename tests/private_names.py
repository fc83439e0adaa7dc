"""The private names of PyTorch that the package uses, and the versions that have them.

A test compares the table with the package's text and walks it on the installed version. `since` and `until` tell of the
versions that were looked at; 2.12 and 2.15 were not. What the hooks replace says itself when a build lacks it
(recording/patches.py). Imports no torch.
"""

from dataclasses import dataclass

LOOKED_AT = ("2.11", "2.13", "2.14")


@dataclass(frozen=True)
class Versions:
    """Which PyTorch has a name: from `since` on, before `until` (none yet), built for `build` (cuda, xpu; "": any).
    `lost`: what the package cannot do without it."""

    since: str = "2.11"
    until: str = ""
    build: str = ""
    lost: str = ""


EVERYWHERE = Versions()

_IN_ALL = """
torch.Tensor._is_zerotensor
torch.Tensor._nested_tensor_size
torch.Tensor._nested_tensor_storage_offsets
torch.Tensor._nested_tensor_strides
torch.UntypedStorage._cdata
torch._C.DisableTorchFunction
torch._C.DispatchKey.Python.value
torch._C.DispatchKey.PythonTLSSnapshot
torch._C.DispatchKeySet.from_raw_repr
torch._C.Future
torch._C.ListType
torch._C.OptionalType
torch._C.ScriptFunction
torch._C.ScriptMethod
torch._C.StorageBase.data_ptr
torch._C.TensorBase
torch._C._AutoDispatchBelowADInplaceOrView
torch._C._AutoDispatchBelowAutograd
torch._C._CUDAGraph
torch._C._DisableFuncTorch
torch._C._DisableTorchDispatch
torch._C._DispatchOperatorHandle.redispatch_boxed
torch._C._EnableTorchFunction
torch._C._ExcludeDispatchKeyGuard
torch._C._ForceDispatchKeyGuard
torch._C._InferenceMode
torch._C._MTIAGraph
torch._C._RestorePythonTLSSnapshot
torch._C._SafeKernelFunction.call_boxed
torch._C._SetExcludeDispatchKeyGuard
torch._C._TorchDispatchModeKey
torch._C._VariableFunctions
torch._C._XPUGraph
torch._C._accelerator_getDeviceIndex
torch._C._accelerator_getStream
torch._C._activate_gpu_trace
torch._C._after_autograd_keyset
torch._C._aoti
torch._C._autograd
torch._C._construct_storage_from_data_pointer
torch._C._cuda_endAllocateToPool
torch._C._cuda_releasePool
torch._C._current_graph_task_id
torch._C._disabled_torch_dispatch_impl
torch._C._dispatch_call_boxed
torch._C._dispatch_dump
torch._C._dispatch_find_schema_or_throw
torch._C._dispatch_get_all_op_names
torch._C._dispatch_get_registrations_for_dispatch_key
torch._C._dispatch_has_computed_kernel_for_dispatch_key
torch._C._dispatch_has_kernel_for_dispatch_key
torch._C._dispatch_key_for_device
torch._C._dispatch_keys
torch._C._dispatch_library
torch._C._dispatch_tls_is_dispatch_key_excluded
torch._C._dispatch_tls_local_exclude_set
torch._C._dispatch_tls_local_include_set
torch._C._dispatch_tls_set_dispatch_key_excluded
torch._C._distributed_c10d.ProcessGroup
torch._C._dynamo.eval_frame._FrameAction
torch._C._dynamo.eval_frame._FrameExecStrategy
torch._C._dynamo.guards.GlobalStateGuard
torch._C._dynamo.guards._reinterpret_tensor
torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
torch._C._fft
torch._C._functorch.is_functorch_wrapped_tensor
torch._C._functorch.peek_interpreter_stack
torch._C._get_blas_preferred_backend
torch._C._get_cpu_allow_fp16_reduced_precision_reduction
torch._C._get_cublas_allow_bf16_reduced_precision_reduction
torch._C._get_cublas_allow_fp16_accumulation
torch._C._get_cublas_allow_fp16_reduced_precision_reduction
torch._C._get_cudnn_allow_tf32
torch._C._get_cudnn_benchmark
torch._C._get_cudnn_deterministic
torch._C._get_cudnn_enabled
torch._C._get_cudnn_sdp_enabled
torch._C._get_deterministic_algorithms
torch._C._get_deterministic_fill_uninitialized_memory
torch._C._get_dispatch_mode
torch._C._get_dispatch_stack_at
torch._C._get_flash_sdp_enabled
torch._C._get_fp32_precision_getter
torch._C._get_linalg_preferred_backend
torch._C._get_math_sdp_allow_fp16_bf16_reduction
torch._C._get_math_sdp_enabled
torch._C._get_mem_efficient_sdp_enabled
torch._C._get_mkldnn_deterministic
torch._C._get_mkldnn_enabled
torch._C._get_nnpack_enabled
torch._C._get_operation_overload
torch._C._get_qengine
torch._C._get_sdp_priority_order
torch._C._has_torch_function_unary
torch._C._get_tracing_state
torch._C._jit_get_operation
torch._C._jit_get_schemas_for_operator
torch._C._last_executed_optimized_graph
torch._C._len_torch_dispatch_stack
torch._C._len_torch_function_stack
torch._C._linalg
torch._C._nn
torch._C._parse_dispatch_key
torch._C._pop_torch_dispatch_stack
torch._C._pop_torch_function_stack
torch._C._profiler
torch._C._push_on_torch_dispatch_stack
torch._C._set_conj
torch._C._set_cpu_allow_fp16_reduced_precision_reduction
torch._C._set_cublas_allow_fp16_accumulation
torch._C._set_cudnn_allow_tf32
torch._C._set_cudnn_benchmark
torch._C._set_cudnn_deterministic
torch._C._set_cudnn_enabled
torch._C._set_deterministic_algorithms
torch._C._set_deterministic_fill_uninitialized_memory
torch._C._set_fp32_precision_setter
torch._C._set_grad_enabled
torch._C._set_math_sdp_allow_fp16_bf16_reduction
torch._C._set_mkldnn_deterministic
torch._C._set_mkldnn_enabled
torch._C._set_neg
torch._C._set_nnpack_enabled
torch._C._set_qengine
torch._C._set_sdp_priority_order
torch._C._set_sdp_use_cudnn
torch._C._set_sdp_use_flash
torch._C._set_sdp_use_math
torch._C._set_sdp_use_mem_efficient
torch._C._should_allow_numbers_as_tensors
torch._C._special
torch._C.parse_schema
torch._compile
torch._decomp.global_decomposition_table
torch._dynamo.convert_frame
torch._dynamo.eval_frame._stance
torch._dynamo.guards.CheckFunctionManager
torch._dynamo.guards.GuardManagerWrapper.check
torch._dynamo.guards.GuardManagerWrapper.check_verbose
torch._dynamo.polyfills.tensor
torch._efficientzerotensor
torch._empty_affine_quantized
torch._empty_per_channel_affine_quantized
torch._higher_order_ops.base_hop.BaseHOP
torch._higher_order_ops.scan.generic_scan
torch._inductor.async_compile
torch._inductor.codecache
torch._inductor.compile_fx
torch._inductor.config.cpp.weight_prepack
torch._inductor.cpp_builder
torch._inductor.cpu_vec_isa
torch._inductor.hooks
torch._inductor.inductor_prims
torch._inductor.kernel
torch._inductor.output_code
torch._inductor.runtime.runtime_utils
torch._inductor.runtime.triton_heuristics.CachingAutotuner._create_compile_meta
torch._inductor.runtime.triton_heuristics.CachingAutotuner._create_compile_options
torch._inductor.runtime.triton_heuristics.CachingAutotuner._reload_kernel
torch._neg_view
torch._nested_view_from_buffer
torch._ops.OpOverload._handle
torch._ops.OpOverload._op_dk
torch._ops.OpOverload._overloadname
torch._ops.OpOverload._schema
torch._ops.OpOverloadPacket._qualified_op_name
torch._ops.OpOverloadPacket._schemas
torch._ops._OpNamespace
torch._ops._Ops.load_library
torch._ops._compute_keyset
torch._prims.rng_prims
torch._refs
torch._refs.special
torch._subclasses.fake_tensor
torch._subclasses.functional_tensor
torch._validate_sparse_compressed_tensor_args
torch.ao.quantization.fx._decomposed
torch.autograd._profiler_enabled
torch.autograd.forward_ad._current_level
torch.autograd.graph._engine_run_backward
torch.cuda._gpu_trace
torch.cuda._sleep
torch.cuda._utils._CudaKernel
torch.cuda.jiterator._JittedFunction
torch.ops._dtensor
torch.distributed.ProcessGroup._allgather_base
torch.distributed.ProcessGroup._reduce_scatter_base
torch.distributed._functional_collectives
torch.distributed._symmetric_memory
torch.distributed._verify_params_across_processes
torch.distributed.distributed_c10d._get_default_store
torch.distributed.distributed_c10d._resolve_process_group
torch.distributed.distributed_c10d._world
torch.distributed.fsdp._fully_shard._fsdp_collectives
torch.library.Library._destroy
torch.library._impls
torch.storage.TypedStorage._untyped_storage
torch.utils._python_dispatch.TorchDispatchMode
torch.utils._python_dispatch._disable_current_modes
torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_map
"""

NAMES = dict.fromkeys(_IN_ALL.split(), EVERYWHERE) | {
    "torch._C._acceleratorGraph": Versions("2.13", lost="graphs exist for the classes of each accelerator alone"),
    "torch._C._cuda_getCurrentRawStream": Versions(build="cuda", lost="nothing: no code compiled for CUDA can run"),
    "torch._C._cuda_hasPrimaryContext": Versions(build="cuda", lost="nothing: there are no contexts"),
    "torch._C._cuda_record_memory_history": Versions(build="cuda", lost="nothing: there is no such observer"),
    "torch._C._cuda_record_memory_history_legacy": Versions(build="cuda", lost="nothing: there is no such observer"),
    "torch._C._cudnn": Versions(build="cuda", lost="the version of cuDNN, which is not there"),
    "torch._C._xpu_getCurrentRawStream": Versions(build="xpu", lost="nothing: no code compiled for XPU can run"),
    "torch._C._xpu_recordMemoryHistory": Versions(build="xpu", lost="nothing: there is no such observer"),
    "torch._dynamo.polyfills.tensor.tensor_pynew": Versions("2.13", lost="nothing: Dynamo traces no polyfill of it"),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner._combo_sequential_autotune": Versions(
        "2.13", lost="nothing: combined kernels are tuned as all others"
    ),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner._ensure_kernel_loaded": Versions(
        "2.13", lost="nothing: kernels are loaded when they are made"
    ),
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner._plugins": Versions("2.13", lost="nothing: no plugins"),
}
