"""Work that reaches devices as code of the program's own, past the dispatcher, and is recorded as ops.

`kernels` describes such code as a kernel with a schema, as an operator has one, and with attachments: its source, its
binaries. `triton_launches` sees launches of Triton kernels. For compiled regions, `inductor_text` reads what Inductor
generated, `inductor_kernels` finds the C++ kernels in it, and `inductor_regions` has their calls recorded.
"""
