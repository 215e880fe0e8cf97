"""What to do about an append-only file that Valkey cannot read any more."""

import re
from pathlib import Path

# a last entry that is cut short is not among them: Valkey drops it by itself
_UNREADABLE = re.compile(
    r"reading the append only file (?P<name>[\w.-]+\w)|Checking RDB file appendonly"
    r"|AOF manifest file contains|Invalid AOF manifest|Unable to obtain the AOF file"
)


def remedy(log: str, folder: Path, server: Path) -> str | None:
    """One line for the end of a server's log; None where it ended of something else."""
    if (found := _UNREADABLE.search(log)) is None:
        return None
    away = (
        f"move {folder} away: every job is in SQL, and lost are only tasks that Celery clients "
        "sent and no worker has claimed"
    )
    name = found["name"]
    if name is None:
        return f"valkey cannot read its append-only file in {folder}: {away}"
    file = folder / "appendonlydir" / name
    if "Bad file format" not in log or not name.endswith(".incr.aof"):
        return f"valkey cannot read {file}: {away}"
    return (
        f"valkey cannot read {file}: copy it, then cut off what is broken and all behind it with "
        f"`valkey-check-aof --fix {file}` (it comes with Valkey: a link of that name to {server}); "
        f"or {away}"
    )
