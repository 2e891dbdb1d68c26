"""A port for the processes of a job on this machine."""

import socket


def free_port(least: int = 0) -> int:
    """A free port; with `least`, the first from there on."""
    for port in range(least, least + 4096):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return free.getsockname()[1]
    raise OSError("no free port")
