"""Files of a probe's run, as Neutrino writes them; all numbers are little-endian.

`results` is a result file (`result/<seconds>.bin`: what each thread or warp saved), `access_maps` a `.dmat` file (how
often each page was used at each clock), `logs` the text beside them, `folders` the folder of a run. Result files are
mapped, not read: a file of gigabytes costs no memory until its records are looked at. Everything that a file
declares is compared with what is there before it is used. No pickle is ever loaded.
"""
