"""Replacing captured kernels with the user's: which calls are replaced, whether the replacements are correct, how they
run."""
