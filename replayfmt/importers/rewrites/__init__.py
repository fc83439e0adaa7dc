"""`--rewrite=portable`: `portable` chooses what takes an operator's place, `attention`, `fused` and `foreign` are the
replacements by family, `rewriting` is what they are written with.
"""
