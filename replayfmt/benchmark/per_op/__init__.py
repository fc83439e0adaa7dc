"""Every op measured on its own: `groups` are the distinct ops, `measuring` times one call of each on the inputs it
has, `report` prints them.
"""
