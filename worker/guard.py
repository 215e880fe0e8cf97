"""Threads that may not die alone.

A worker that lost one of its threads would look alive and do half of its work. Ending the whole
process is safe, because nothing but the rows counts: its lease lapses and others take over.
"""

import logging
import os
import threading
from collections.abc import Callable

EXIT_SOFTWARE = 70  # sysexits.h: an internal software error

logger = logging.getLogger(__name__)


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Run `target` in a daemon thread; an exception out of it ends the process with a trace."""
    thread = threading.Thread(target=_guarded, args=(name, target), name=name, daemon=True)
    thread.start()
    return thread


def _guarded(name: str, target: Callable[[], None]) -> None:
    try:
        target()
    except BaseException:
        logger.critical("thread %s failed; the worker ends", name, exc_info=True)
        logging.shutdown()
        os._exit(EXIT_SOFTWARE)
