"""Files that a capture refers to by path: `files` opens and validates them, `file_digest` names their content, and
`file_remap` says where they are now.
"""
