"""Work that bypasses the dispatcher, observed by patching functions of other libraries while a capture runs.

`patches` replaces and restores, `import_watch` tells when a module is there to be patched. `host_reads` records values
that leave the device, `direct_writes` what writes memory without an operator, `undispatched` everything else that
reaches a device unseen, as unsupported. `construction` lets a program make tensors of its own classes.
"""
