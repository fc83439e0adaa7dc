"""Finds what each captured kernel is replayed with.

`kernel_lookup` finds operators of the installed torch, and is the gate to code in captures; `code_kernels` are the
kernels made of it. `graph_kernels` opens the bodies of a capture's device graphs and makes kernels of them,
`graph_bodies` issues their ops.
"""
