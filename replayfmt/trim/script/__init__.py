"""A few ops as one Python file that needs only torch: `export` cuts them out, `events` collects the actions of the
script, `text` writes them with `values` as expressions, `file` adds the surrounding frame.
"""
