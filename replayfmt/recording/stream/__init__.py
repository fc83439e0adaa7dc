"""The records on their way to the file.

`session` holds what a capture knows: storages and their views, metadata, and packed rows of all threads, which `buffer`
passes to the writer. `records` makes the rows that are not ops and assigns ids to tensor metadata, `scopes` keeps the
open regions. `program_state` records the global settings and the random generators that results depend on,
`device_streams` the streams of accelerators and what orders their work.
"""

from __future__ import annotations
