"""What recording and replay know of Triton.

`functions` looks into Triton's objects: which function a kernel object runs, and its parameters. `sources` writes a
kernel as a module of its own that needs nothing but Triton, and loads such modules again. `accesses` finds which
parameters a kernel may write, from its source. `forms` lays out the arguments of a launch as the arguments of a schema,
and puts them together again. Nothing here imports Triton before a program has, but what loads a module.
"""
