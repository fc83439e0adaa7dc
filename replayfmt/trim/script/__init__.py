"""A few ops as one Python file that needs only torch: `export` cuts them out, `events` collects what the script does,
`text` writes it with `values` as expressions, `file` is the frame around it.
"""
