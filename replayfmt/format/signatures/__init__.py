"""Signatures of ops as text (docs/signatures.md): `text` prints, reads and compares them, `parser` reads text written
by a user, `values` are their parts, and `groups` counts a capture's ops by signature.
"""
