"""The configuration that a sidecar started with, for its children: also for one that is started anew months later.

They do not load the file again. Who edits it, or a ConfigMap that is mounted, changes it under a running pod: a relay
worker that is replaced could then not read it, or would count other strata than the table of counts has, and the pod
would not serve.
"""

from pathlib import Path

import msgspec

from quantdrift.core.config.schema import Config

_NAME = "config"


def settle(config: Config, directory: Path) -> Path:
    """Write the configuration into a directory of this sidecar alone, and return where.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = directory / _NAME
    path.write_bytes(msgspec.msgpack.encode(config))
    return path


def settled(path: Path) -> Config:
    """Return what `settle` wrote.

    Raises
    ------
    OSError
        It cannot be read.
    """
    return msgspec.msgpack.decode(path.read_bytes(), type=Config)
