"""The file as bytes: frames one after the other, an index at the end, payloads between them.

Writing: `output` is the file under its `.partial` name, `frame_output` appends frames and the index, `payload_output`
the payloads; `uninterrupted` keeps signal handlers out of a write. Reading: `source` returns bytes that are there or
one error, `frames` their fixed parts and limits, `index` and `frame_scan` the two ways to find every frame, `contents`
chooses between them, `payload_input` reads payloads. `flatbuffer_tables` and `layouts` check a FlatBuffer before any of
its fields is used.
"""
