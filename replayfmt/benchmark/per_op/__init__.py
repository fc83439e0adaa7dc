"""Every op measured on its own: `groups` are the distinct ops, `measuring` times one call of each on its actual inputs,
`results` is what that found, `rows` adds it up by kernel, signature or scope, `report` turns it into JSON and CSV,
`table` prints it.
"""
