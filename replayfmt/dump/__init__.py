"""A capture as text or JSON lines. `stream` is the dump; `definitions` and `contents` are what comes before the
records, `row_templates` and `record_rows` the records. `listings` and `kernel_skeleton` stand
apart.
"""
