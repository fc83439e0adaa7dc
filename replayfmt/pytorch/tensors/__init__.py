"""Tensors and their memory, inspected without the program's noticing.

`memory` reads a tensor's fields, maps the format's codes, holds sizes and strides against memory, makes storages and
views on them, and brings bytes to a device and back. `composites` takes sparse, quantized and
nested tensors apart and puts them together, `packed_parameters` the weights of quantized modules. `digests` computes
what verification compares.
"""

from __future__ import annotations
