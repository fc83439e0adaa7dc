"""`--rewrite=portable`: `portable` chooses an operator's replacement and has most of them, `engines` has those of
serving engines, `rewriting` is the toolkit that they use.
"""
