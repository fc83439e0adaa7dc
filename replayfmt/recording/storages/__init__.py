"""The program's memory: which storage is which, what it held when the capture first met it, when it dies.

`identity` keeps every storage's id and enters it at its first use; a storage's `trackers` entry holds what is known of
it, `addresses` finds those on the same bytes, `coverage` what ops have written, `unexplained` what is computed from
bytes that nobody wrote. `content` decides by the policies where first content comes from: embedded (`storage_content`),
a file's (`external_files`, with `known_files`, `file_mappings` and `pages`), or left out with a recipe (`recipes`).
"""
