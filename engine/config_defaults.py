"""The sizes that a config.json leaves to the defaults of its class in transformers.

Asked of a process of its own: those who ask hold neither torch nor transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 60.0  # transformers takes seconds to import from a cold disk

_ASK = """
import json, sys
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1]).get_text_config()
names = ("vocab_size", "max_position_embeddings")
print(json.dumps({name: getattr(config, name, None) for name in names}))
"""


def sizes_by_default(folder: Path) -> dict[str, object]:
    """`vocab_size` and `max_position_embeddings` as transformers fills them in; empty where not."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, str(folder)],
            capture_output=True,
            timeout=TIMEOUT_S,
            check=True,
            env=environment,
        )
        sizes = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}  # the caller names what is missing
    assert isinstance(sizes, dict)
    return sizes
