r"""How the strings of an output that has a JSON schema may spell characters.

As JSON's short escapes, and else as themselves. With `\u0061` a key that `additionalProperties`
allows could spell one that is declared, whose schema its value need not have. The price is the
control characters without a short escape: no output holds one, unless the schema itself does.
"""

import json
from typing import Any

_SHORT = 'nrbtf\\"'
_LONG = "u"


def allowed_escapes(schema: Any) -> str:
    """The letters that may follow a backslash in an output that has this schema."""
    written = json.dumps(schema, ensure_ascii=False)
    speaks_of_one = "\\u00" in written or "\x7f" in written
    return _SHORT + _LONG * speaks_of_one
