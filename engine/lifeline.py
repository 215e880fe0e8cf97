"""A process that ends with its parent, however that ends."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def heed_parent_alone() -> None:
    """Die when the parent does, and leave a terminal's and a service manager's signals to it.

    The kernel is asked for SIGKILL: in a long step nobody reads a pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
