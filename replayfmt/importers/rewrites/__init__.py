"""`--rewrite=portable`: `portable` chooses an operator's replacement, `attention`, `fused` and `foreign` are the
replacements by family, `rewriting` is the toolkit that they use.
"""
