"""Watches the configuration's files, and says what of a new configuration may hold without a restart.

A mounted ConfigMap is replaced without a signal, so files are looked at. Ports, the stream and what processes are made
of stay as they were at the start; everything that says what is taken, how much, and of what, is taken over.
"""

import logging
from pathlib import Path

import msgspec

from quantdrift.core.config.load import Secrets, load
from quantdrift.core.config.parts import Signature, signature
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import OperatorError
from quantdrift.sidecar.settled import RowsError, Settled

_LOG = logging.getLogger(__name__)

# By section: options that hold at once. Of sections that are not named all do, or none where a sidecar does not ask.
_LIVE = {
    "sidecar": ("max_connections", "max_header_bytes", "max_exchange_bytes", "max_held_bytes"),
    "intake": ("pair_window_s", "max_pending_bytes"),
    "stream": (),
    "telemetry": (),
}
_SECTIONS = ("capture", "sampling", "models", "slices")


class Watch:
    """Tells when the files have changed and have rested since; once more at the start, whether they have or not.

    Parameters
    ----------
    path
        The main file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Not those of now: the files may have changed since the configuration of the start was read.
        self._loaded: Signature | None = None
        self._seen: Signature | None = None

    def look(self) -> Config | None:
        """Return the configuration if the files have changed, and have rested for one look.

        Raises
        ------
        OperatorError
            It is none. The next change is looked at again.
        """
        now = signature(self._path)
        rests, self._seen = now == self._seen, now
        if now == self._loaded or not rests:
            return None
        self._loaded = now
        return load(self._path)


def taken_over(before: Config, new: Config) -> tuple[Config, list[str]]:
    """Return what holds now, and which options of `new` need a restart.

    Parameters
    ----------
    before
        What held.
    new
        What the files say.
    """
    merged = msgspec.structs.replace(before, **{name: getattr(new, name) for name in _SECTIONS})
    waiting = []
    for section, live in _LIVE.items():
        held, wanted = getattr(before, section), getattr(new, section)
        changed = [name for name in held.__struct_fields__ if getattr(held, name) != getattr(wanted, name)]
        waiting += [f"{section}.{name}" for name in changed if name not in live]
        taken = msgspec.structs.replace(held, **{name: getattr(wanted, name) for name in live})
        merged = msgspec.structs.replace(merged, **{section: taken})
    keys = ("hmac_key_file",)
    waiting += [
        f"capture.{name}" for name in keys if getattr(before.capture, name) != getattr(new.capture, name)
    ]
    return merged, waiting


def follow(watch: Watch, before: Settled, secrets: Secrets) -> Settled | None:
    """Return what holds from now on if the files say something else that can be taken over.

    Parameters
    ----------
    watch
        Looks at the files.
    before
        What held.
    secrets
        Of the start: they are not read again.

    Raises
    ------
    OperatorError
        The files say what cannot be; what held goes on.
    """
    new = watch.look()
    if new is None:
        return None
    merged, waiting = taken_over(before.config, new)
    if merged.capture.hmac and not secrets.hmac_key:
        raise OperatorError("capture.hmac has no key: that needs a restart")
    if waiting:
        _LOG.warning("needs a restart of the sidecar: %s", ", ".join(waiting))
    try:
        return Settled.of(merged, before.rows)
    except RowsError as error:
        raise OperatorError(str(error)) from error
