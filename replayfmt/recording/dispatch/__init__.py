"""Every operator call of the program, seen by a dispatch mode.

`mode` gets the call, on the `mode_stack` of its thread; `kernels` knows the operator, and `calls` takes the complete
path: what must be recorded before the call, the call itself, its record after. `arguments` turns values into a
signature and slots, `unpacked` gives packed parameters their tensors, `handles` knows addresses that operators return,
`wrapped_numbers` numbers in place of tensors. `higher_order` and `collectives` are operators with rules of their
own.
"""
