"""From a capture to a smaller one, to a script, or to test vectors.

`schedule` says which records are kept, and what they need besides; `copying` and `writing` write them.
`trimming` is the whole operation, with content that `materializing` takes from a replay. `script` writes Python, from
`script_text` and `script_triton`; `vectors` writes test vectors.
"""
