"""Probes: what happens inside one kernel, recorded by instructions put into it, and what the recordings say.

`recordings` reads and writes the files of Neutrino (OSDI'25), which this project writes, too. `schedule`, `dmat` and
`costs` make tables (`tables`) of them, `pictures` draws these, `reporting` does both for the files that a user names.
`definitions` reads probes (TOML, `shipped/`), `ptx` inserts them into PTX, `instrumenting` into kernels of captures and
files. None of it needs a GPU or imports torch; `pictures` imports matplotlib (`pip install 'opreplay[probe]'`) when it
draws.
"""
