"""Every op measured on its own: `groups` are the distinct ops, `measuring` times one call of each on its actual inputs,
`rows` adds them up by kernel, signature or scope, `report` turns that into JSON and CSV, `table` prints it.
"""
