"""Every op measured on its own: `groups` are the distinct ops, `measuring` times one call of each on the inputs it
has, `rows` adds them up by kernel, signature or scope, `report` makes JSON and CSV of that, `table` prints it.
"""
