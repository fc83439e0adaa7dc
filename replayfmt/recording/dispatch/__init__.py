"""Every operator call of the program, as a dispatch mode or the native hook sees it.

`mode` receives the call, on the `mode_stack` of its thread (`native_mode`: from the hook). `kernels` describes the
operator, and `calls` is the complete path: what must be recorded before the call, the call itself, its record
afterwards. `arguments` turns values into a signature and slots, `unpacked` represents packed parameters by tensors,
`handles` keeps addresses that operators return, `wrapped_numbers` handles numbers in place of tensors. `higher_order`
and `collectives` handle operators with rules of their own.
"""
