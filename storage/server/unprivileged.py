"""The unprivileged account that a Postgres server runs under: Postgres refuses to run as root, and must end with its owner."""

import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from quantdrift.core.errors import OperatorError
from quantdrift.core.passed_secrets import without_secrets

_NOBODY = 65534
# The kernel sends this signal when the parent has ended for any reason; it means a fast shutdown.
_SIGNAL_WHEN_PARENT_ENDS = ("--pdeathsig", "INT")


class UnprivilegedUser(msgspec.Struct, frozen=True, kw_only=True):
    """The way to start a program so that it is not root and ends with its owner.

    Parameters
    ----------
    prefix
        Command that ends by executing, under the same process id, the one appended to it.
    uid, gid
        Owner that its files need, as this process sees it.
    """

    prefix: tuple[str, ...]
    uid: int
    gid: int


def choose_account(directory: Path, program: str) -> UnprivilegedUser:
    """Return the account for a server whose files are under `directory`.

    A process that is not root stays what it is. Root becomes the owner of `directory`; where that is root
    itself, `nobody`; and where `nobody` cannot reach `directory` or `program` (a 0700 home), root in a user
    namespace of its own, in which it is called `nobody`.

    Parameters
    ----------
    directory
        It exists. If it is owned by root and not empty, the user namespace was chosen before.
    program
        The server, run with `--version` to see whether the account can reach it.

    Raises
    ------
    OperatorError
        No account works here; the message says what to do.
    """
    setpriv = _tool("setpriv")
    owner = directory.stat()
    if os.geteuid() != 0:
        return UnprivilegedUser(
            prefix=(setpriv, *_SIGNAL_WHEN_PARENT_ENDS, "--"), uid=os.geteuid(), gid=os.getegid()
        )
    accounts = []
    if owner.st_uid != 0:
        accounts.append(_user(setpriv, owner.st_uid, owner.st_gid))
    else:
        if not any(directory.iterdir()):
            accounts.append(_user(setpriv, _NOBODY, _NOBODY))
        accounts.append(_namespace(setpriv))
    for account in accounts:
        if _reaches(account, directory, program):
            return account
    raise OperatorError(
        f"Postgres does not run as root, and no other account can reach both {directory} and {program}: put the"
        " data directory and the environment where every user may enter the directories above them, or run"
        " as an ordinary user"
    )


def _user(setpriv: str, uid: int, gid: int) -> UnprivilegedUser:
    ids = (f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    return UnprivilegedUser(prefix=(setpriv, *ids, *_SIGNAL_WHEN_PARENT_ENDS, "--"), uid=uid, gid=gid)


def _namespace(setpriv: str) -> UnprivilegedUser:
    # The death signal last: a change of credentials clears it.
    users = ("-U", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}", "--")
    return UnprivilegedUser(
        prefix=(_tool("unshare"), *users, setpriv, *_SIGNAL_WHEN_PARENT_ENDS, "--"), uid=0, gid=0
    )


def _reaches(account: UnprivilegedUser, directory: Path, program: str) -> bool:
    script = 'test -x "$1" && exec "$0" --version'
    result = subprocess.run(  # noqa: S603 - our own command
        [*account.prefix, "/bin/sh", "-c", script, program, directory.parent],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        cwd="/",
        timeout=30,
        env=without_secrets(os.environ),
    )
    return result.returncode == 0


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise OperatorError(
            f"the embedded Postgres needs `{name}`, so that it never outlives its owner: install util-linux, or"
            " set QUANTDRIFT_DSN to the address of a server you run"
        )
    return path
