"""The content of storages that no captured op produced: where it comes from, and how it is read.

`first_content` decides by the capture's policies: content is embedded, in a file, replaced by a recipe, or absent.
`storage_content` reads a storage's bytes, `file_mappings` knows which memory is mapped from which file, and `coverage`
tracks which bytes of a storage ops have written.
"""
