"""From records to straight-line Python.

`lowering` goes through the records and writes a `windows` entry for each stretch of them; `op_lowering` writes an op's
line from the `call_templates` of its signature. `operations` are what the code calls besides operators, `liveness` says
which variables exist, `frame_lists` returns columns as lists.
"""
