"""What does not pass the dispatcher, seen by functions of other libraries that are replaced while a capture runs.

`patches` replaces and puts back, `import_watch` tells when a module is there to be patched. `host_reads` records values
that leave the device, `direct_writes` what writes memory without an operator, `undispatched` everything else that
reaches a device unseen, as unsupported. `construction` lets a program make tensors of its own classes.
"""
