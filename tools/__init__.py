"""The command line tools: one thin command each. Parse flags, call the library, print, choose the exit code."""
