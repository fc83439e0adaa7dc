"""Work that bypasses the dispatcher, observed by patching functions of other libraries while a capture runs.

`patches` replaces and restores functions, `import_watch` reports when a module can be patched. `host_reads` records
values that leave the device, `direct_writes` handles memory written without an operator, and `undispatched` records all
other work that reaches a device unseen as unsupported. `construction` lets a program construct tensors of its own
classes.
"""
