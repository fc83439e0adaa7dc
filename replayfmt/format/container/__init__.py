"""The file as bytes: frames one after the other, an index at the end, payloads between them.

Writing: `output` is the file under its `.partial` name, `frame_output` appends frames and the index, `payload_output`
the payloads; `uninterrupted` keeps signal handlers out of a write. Reading: `source` returns bytes that are there or
one error, `frames` their fixed parts and limits, `index` and `walk` the two ways to find every frame, `contents`
chooses between them, `payload_input` reads payloads. `flat` and `layouts` check a FlatBuffer before a field of it is
believed.
"""
