"""Every op measured on its own: `groups` are the distinct ops and their work, `measuring` times one call of each on its
actual inputs, `results` is what that found, by kernel, signature or scope, `roofline` compares it with the peaks of the
device, `op_report` turns it into JSON, CSV and a table.
"""
