"""The records on their way to the file.

`buffer` holds packed rows of all threads and passes them to the writer. `records` makes the rows that are not ops and
assigns ids to tensor metadata, `scopes` keeps the open regions. `program_state` records the global settings and the
random generators that results depend on, `device_streams` the streams of accelerators and what orders their work.
"""

from __future__ import annotations
