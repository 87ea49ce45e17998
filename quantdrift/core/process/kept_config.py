"""The last accepted configuration, kept on this machine for a restart while its files are broken.

A running sidecar refuses a broken file and goes on; without this a restart of it would close the serving port. Only the contents
of the files are kept, as JSON: overrides and secrets come from the environment again.
"""

import contextlib
import hashlib
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from quantdrift.core.config.load import config_of, load
from quantdrift.core.config.parts import Parts, read_parts
from quantdrift.core.config.schema import Config
from quantdrift.core.config.state import config_digest, config_state
from quantdrift.core.errors import OperatorError
from quantdrift.core.passed_secrets import variables
from quantdrift.core.process.shared_memory import user_directory

DIRECTORY_VARIABLE: Final = "QUANTDRIFT_STATE_DIRECTORY"
"""Where it is kept; `quantdrift up` sets it to its data directory. Else systemd's `STATE_DIRECTORY`, else memory."""
KEPT: Final = "accepted-config"
"""The directory in the data directory of `quantdrift up`."""
MOST: Final = 64
"""Configurations of one user that are kept in memory, the newest."""
_SUFFIX: Final = ".config"
_LOG = logging.getLogger(__name__)


class KeptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that was accepted.

    Parameters
    ----------
    path
        Its main file, absolute.
    document
        What its files contain together, as JSON.
    digest
        SHA-256 of its options that differ from their default, as the log and the audit have it.
    accepted_at
        Aware, UTC.
    """

    path: str
    document: msgspec.Raw
    digest: str
    accepted_at: datetime

    def config(self) -> Config:
        """Return it with the overrides of the present environment.

        Raises
        ------
        OperatorError
            An override is wrong, or another release has kept it.
        """
        return config_of(Parts(msgspec.json.decode(self.document), {}), Path(self.path))

    def __str__(self) -> str:
        return f"that of {self.accepted_at:%Y-%m-%d %H:%M:%S} UTC (digest {self.digest[:16]})"


def keep(path: Path) -> None:
    """Keep the configuration in `path`, which was accepted; where that is not possible, the log says so."""
    try:
        parts = read_parts(path)
        document = msgspec.Raw(
            msgspec.json.encode(parts.document)
        )  # before the environment's overrides are in it
        kept = KeptConfig(
            path=str(path.resolve()),
            document=document,
            digest=config_digest(config_state(config_of(parts, path))),
            accepted_at=datetime.now(UTC),
        )
        directory = _directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = directory / _name(path)
        new = file.with_suffix(f".{os.getpid()}.new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:  # noqa: PTH123 - with its mode
                stream.write(msgspec.json.encode(kept))
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        _remove_oldest(directory)
    except (OSError, OperatorError, msgspec.MsgspecError, TypeError) as error:
        _LOG.warning("the configuration in effect cannot be kept for a restart with a broken file: %s", error)


def kept(path: Path, directory: Path | None = None) -> KeptConfig | None:
    """Return the last accepted configuration of `path`; None: there is none that can be read.

    Parameters
    ----------
    directory
        Where it is; None: where this process would keep it.
    """
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        last_accepted = msgspec.json.decode(
            ((directory or _directory()) / _name(path)).read_bytes(), type=KeptConfig
        )
        if last_accepted.path == str(path.resolve()):
            return last_accepted
    return None


def load_or_kept(path: Path, directory: Path | None = None) -> tuple[Config, str]:
    """Return the configuration in `path`, or the last one that was accepted if that is wrong or missing, and then why.

    Parameters
    ----------
    directory
        As of `kept`.

    Raises
    ------
    OperatorError
        It is wrong, and none was accepted before.
    """
    try:
        return load(path), ""
    except OperatorError as error:
        last = kept(path, directory)
        if last is None:
            raise
        with contextlib.suppress(OperatorError):
            return last.config(), f"{error}\nThe last one that was accepted is used instead, {last}"
        raise


def _directory() -> Path:
    environment = variables()
    for name in (DIRECTORY_VARIABLE, "STATE_DIRECTORY"):
        if directory := environment.get(name, "").partition(":")[0]:
            return Path(directory)
    return user_directory(make=True)


def _name(path: Path) -> str:
    return f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}{_SUFFIX}"


def _remove_oldest(directory: Path) -> None:
    files = []
    for file in directory.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            files.append((file.stat().st_mtime_ns, file))
    for _, file in sorted(files)[:-MOST]:
        file.unlink(missing_ok=True)
