"""Probes: what happens inside one kernel, recorded by instructions put into it, and what the recordings say.

`recordings/` reads and writes the files of Neutrino (OSDI'25), which this project writes, too: results, access maps,
logs, the folder of a run. `evaluations/` makes tables of them, `pictures/` draws these, `reporting` does both for a
tool. `definitions` reads probes from TOML files, `shipped/` has some, and `ptx/` puts them into kernels. None of it
needs a GPU or imports torch; `pictures` imports matplotlib (`pip install 'opreplay[probe]'`) when it draws.
"""
