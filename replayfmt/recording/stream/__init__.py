"""The records on their way to the file: `buffer` holds packed rows of all threads and passes them to the writer.
`records` makes the rows that are not ops, `tensor_metas` assigns ids to tensor metadata, `scopes` and `implicit_scope`
keep the open regions, `digesting` records digests, `redacted_writer` leaves out what identifies the machine and the
user.
"""
