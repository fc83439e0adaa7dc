"""From records to straight-line Python.

`lowering` goes through the records and produces a `windows` entry for each stretch of them; `op_lowering` writes an
op's line from the `call_templates` of its signature. `operations` are the non-operator calls in the code, `liveness`
tracks which variables exist, `frame_lists` converts columns to lists.
"""
