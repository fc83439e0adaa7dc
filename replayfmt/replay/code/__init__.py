"""Code kernels of captures: how each kind is resolved and called. Nothing here is used unless the user allows code.

`allowed` is the gate: it refuses every such kernel without leave, and reads and verifies its attachments with it.
`RESOLVERS` there has one function for each kind, which makes a ResolvedKernel of them, in a module of its own:
`inductor_cpp` for the C++ kernels of compiled regions, `triton_kernels` for Triton's, which `triton_launcher` launches.
"""
