"""Replacement of captured kernels with the user's: which calls they replace, whether they are correct, how they run."""
