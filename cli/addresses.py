"""Ports and hosts of this machine: what is free, what is taken."""

import socket

from jobs.settings import Settings


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody has bound at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_holder(host: str, port: int) -> str | None:
    """Why `host:port` cannot be listened on; None when it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"cannot listen on {host}:{port}: {error.strerror}; give another with --port"
    return None


def service_url(settings: Settings) -> str:
    """Where a client on this machine finds the API of these settings."""
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
