"""The capture file: its format, read and written. Never imports torch.

From the bottom up: `codes` and `model` are numbers and plain values. `frames` (fixed parts and limits), `source` and
`output` (bytes in and out) and `flatbuffer_tables` are the file; `contents` finds its frames, `frame_output` appends
them. Definitions: `definition_families`, `signature_layout`, `definition_tables`. Records: `record_columns` on the way
in, `record_frames` on the way out. `writer` and `reader` put all together.

On top of them: `attachments`, `external_files`, `redaction`, `maintenance` (verify, recover, add digests), signatures
as text (`signature_text`, `signature_grammar`), and what is computed from records: `memory` and `races`.
`operator_schema` and `validation` know nothing of captures.
"""
