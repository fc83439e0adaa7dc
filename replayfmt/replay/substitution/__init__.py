"""Kernels of the user in the place of captured ones: which calls they take, whether they are right, how they run."""
