"""What goes to the file, in order: `buffer` holds packed rows of any thread and hands them to the writer. `records`
makes the rows that are not ops, `tensor_metas` gives tensor metadata its ids, `scopes` and `implicit_scope` keep the
open regions, `digesting` states digests, `redacted_writer` leaves out whose machine it was.
"""
