"""What records refer to by id: strings, devices, kernels, scopes, tensor metadata, signatures, external files.

One module for each family, named after it: its columns, how a definition becomes a row and a row a definition, and what
a row must obey. `family` says what a family is; `tables` lists them and has the Tables body, both ways; `checks` is a
body while it is checked. `interning` gives the writer's definitions their ids, `reading` joins bodies and makes the
objects on demand. `signature_rules` is what a signature may look like for writer and reader alike.
"""
