"""PTX, the text that GPU kernels are compiled to before machine code, with probes put into it.

`parsing` finds entry functions, their parameters and instructions in the text and keeps their places; `rewriting`
puts a probe's instructions between them and leaves every other character as it is; `assembling` runs ptxas.
"""
