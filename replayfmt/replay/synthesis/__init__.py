"""Fills storages whose content is neither in the capture nor in a file.

`content_uses` finds every way in which ops use such content, `value_ranges` and `captured_content` what values it may
have, `assignment` which initializer fills which storage; `filling` calls the initializer, and `calls` are ops as
initializers see them.
"""
