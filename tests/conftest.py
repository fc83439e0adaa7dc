"""What every test needs of the process it runs in."""

import signal

# A shell without job control starts background jobs with SIGINT ignored, and so would be every program started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
