"""The program's memory: the identity of storages, their content at first use, their release.

`identity` keeps every storage's id and enters it at its first use; a storage's `trackers` entry holds what is known of
it, `addresses` finds those on the same bytes, `coverage` what ops have written, `unexplained` what is computed from
bytes that were never written. `content` decides by the policies where first content comes from: embedded
(`storage_content`), a file's (`external_files`, with `known_files`, `file_mappings` and `pages`), or left out with a
recipe (`recipes`).
"""
