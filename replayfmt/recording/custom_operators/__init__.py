"""Operators of other packages than PyTorch: recorded whole, or as the operators that they call.

`composite_operators` says which, `whole_composites` has composites come whole, `observing` records those written in
Python by what happens inside, `insides` keeps what the user says and what was seen of it. `declared_work` reports
operators whose work bypassed the recorder.
"""
