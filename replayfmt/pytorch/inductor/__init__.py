"""What recording and replay know of the C++ kernels that Inductor generates. Neither needs Inductor for it.

`cpp_kernels`: a kernel's parameters, the schema made of them, and what a capture stores of it. `code_machine`: what a
compiled kernel must find again to run as it did. `cpp_library`: compiles and loads kernels for a replay.
`library_paths`: takes the paths of the machine out of a library.
"""
