"""Content that is neither in the capture nor in a file.

`uses` finds every way in which ops use it, `ranges` and `captured_content` what it has to be, `assignment` which
initializer fills which storage, `filling` calls it; `calls` are ops as initializers see them.
"""
