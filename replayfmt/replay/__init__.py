"""Doing a capture's work again: plan it, execute it, verify it. Knows nothing of how captures are made."""
