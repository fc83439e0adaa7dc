"""Tensors and their memory, inspected without the program's noticing.

`memory` reads and makes storages and views on them, `bounds` holds tensors against their memory, `staging` brings bytes
to a device. `composites` takes sparse, quantized and nested tensors apart and puts them together, `packed_parameters`
the weights of quantized modules. `dtypes` maps the format's codes, `digests` computes what verification compares,
of the `elements` of a view in pieces and their `statistics`. `looks` says how to look.
"""
