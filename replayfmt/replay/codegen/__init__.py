"""From records to straight-line Python.

`lowering` goes through the records and produces a `windows` entry for each stretch of them; `op_lowering` writes an
op's line from the `call_templates` of its signature, `streams` switches and orders streams. The calls in the code that
are no kernels are in operations.py beside this package.
"""
