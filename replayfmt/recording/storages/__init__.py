"""The program's memory: the identity of storages, their content at first use, their release.

`identity` keeps every storage's id and imports it at its first use. `trackers` holds what is known about a storage,
`addresses` finds storages on the same bytes, `coverage` tracks what ops have written, and `unexplained` values computed
from bytes that were never written. `content` decides by the capture's policies where first content comes from: embedded
(`storage_content`), in a file (`external_files`, with `known_files`, `file_mappings` and `pages`), or replaced by a
recipe (`recipes`).
"""
