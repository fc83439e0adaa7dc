"""Content that is neither in the capture nor in a file.

`content_uses` finds every way in which ops use it, `value_ranges` and `captured_content` what it has to be,
`assignment` which initializer fills which storage, `filling` calls it; `calls` are ops as initializers see them.
"""
