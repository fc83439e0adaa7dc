"""Operators of packages other than PyTorch: recorded whole, or as the operators that they call.

`composite_operators` identifies composites, `whole_composites` makes them reach the recorder whole, `observing` records
operators written in Python according to what happens inside, `insides` keeps the user's choices and what was observed.
`declared_work` reports operators whose work bypassed the recorder. `replaced_operators` finds PyTorch's own for which
the program has kernels of its own.
"""
