"""Work that bypasses the dispatcher, observed by patching functions of other libraries while a capture runs.

`host_access` records values that leave the device for the host, and handles memory written without an operator.
`user_code` lets Python code of the program through that runs in the middle of PyTorch's or the recorder's: constructors
of its own tensor classes, finalizers and signal handlers.
"""
