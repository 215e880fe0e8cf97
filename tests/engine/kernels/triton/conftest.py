"""Where Triton is, and in which of its two modes.

`TRITON_INTERPRET` decides when a kernel's module is imported, for the whole process: what is in
`interpreted/` runs in a process of its own (`test_in_the_interpreter`), the rest without it.
"""

import importlib.util
import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["*"]
elif INTERPRETED:
    collect_ignore_glob = ["test_*.py"]
else:
    collect_ignore = ["interpreted"]
