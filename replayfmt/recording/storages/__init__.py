"""The program's memory: the identity of storages, their import at first use, their release.

`identity` keeps every storage's id and imports it at its first use. `trackers` holds what is known about a storage.
`digesting` records digests of live storages, and what happens to memory outside of recorded operators.
"""

from __future__ import annotations
