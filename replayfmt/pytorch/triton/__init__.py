"""What recording and replay know of Triton.

`sources` looks into Triton's objects, writes a kernel as a module of its own that needs nothing but Triton, and loads
such modules again. `accesses` finds which parameters a kernel may write, from its source or its intermediate code.
`compiled` keeps what Triton compiled. `kernels` is a kernel as a capture holds it, and lays out the arguments of a
launch as those of a schema. Nothing here imports Triton before a program has, but what loads a module.
"""

from __future__ import annotations
