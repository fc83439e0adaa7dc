"""A capture as text or JSON lines. `stream` is the dump; `definitions` and `contents` are what comes before the
records, `row_templates` and `record_rows` the records, and `selection` which of them. `expansion` fills the templates
of all rows, in Python or in C++. `listings` are of a whole capture; `kernel_skeleton` stands apart.
"""

SHOWN_VALUES = 64  # of a tensor with more elements, none is shown
MOST_VALUES = 4096  # that can be requested
