"""`python -m replayfmt TOOL …`: the command line tools."""

import runpy

if __name__ == "__main__":
    runpy.run_module("opreplay_tools", run_name="__main__")
