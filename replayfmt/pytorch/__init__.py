"""What recording and replay both need of PyTorch: codes, memory, numeric settings, digests, the environment.

The only package below recording and replay that imports torch.
"""
