"""What records refer to by id: strings, devices, kernels, scopes, tensor metadata, signatures, external files.

`interning` gives the writer's definitions their ids, `tables_output` makes a Tables body of them. `checks` verifies a
body that is read, `reading` joins the bodies and makes the objects on demand. `external_files` is the family of
external files, ranges and recipes, both ways; `signature_rules` what a signature may look like for writer and reader
alike.
"""
