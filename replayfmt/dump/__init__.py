"""A capture as text or JSON lines. `stream` is the dump; `definitions` and `contents` are what comes before the
records, `row_templates` and `record_rows` the records, and `selection` which of them. `listings` are of a whole
capture; `kernel_skeleton` stands apart.
"""
