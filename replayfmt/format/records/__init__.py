"""The capture's stream: one frame's worth of records as columns, on the way in and on the way out.

`builder` gathers records into frames and `columns` encodes one for the writer; `record_frames` checks and decodes a
frame, `values` makes one record's arguments and results of it. `storage_rules` and `digest` say what rows of storages
and of digests hold.
"""
