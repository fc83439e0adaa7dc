"""Signatures of ops as text (docs/signatures.md): `text` prints, reads and compares them, `parser` reads what
somebody wrote, `values` are their parts, and `groups` counts a capture's ops by signature.
"""
