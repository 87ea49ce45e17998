"""Relay workers without a supervisor: whom they give their socket to, and when they end."""

import asyncio
import os
import socket

import pytest

from quantdrift.sidecar.state import orphans
from quantdrift.sidecar.state.orphans import Adoption, Orphan, adopt
from tests.support.sidecar.relay_rig import until

pytestmark = pytest.mark.integration


async def test_a_worker_gives_its_socket_to_one_supervisor_after_the_other() -> None:
    """One that ends before it serves leaves the worker as it was; one that serves lets it drain."""
    ended: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        orphan = Orphan(listener, lambda *, taken_over: ended.append(taken_over), lambda: (0, 0))
        first = Adoption()
        assert await asyncio.to_thread(first.ask, os.getpid())
        assert first.listener is not None
        assert first.listener.getsockname() == listener.getsockname()
        first.listener.close()
        first.close()  # as where its process is killed
        second = Adoption()
        assert await asyncio.to_thread(second.ask, os.getpid())
        assert second.listener is not None
        assert not ended
        with second.listener:
            second.release()
            await until(lambda: bool(ended))
        third = Adoption()
        assert not await asyncio.to_thread(third.ask, os.getpid())
        assert ended == [True]
        del orphan


async def test_a_worker_that_drains_says_so() -> None:
    """It has no socket to give, and need not be killed for that."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    ended: list[bool] = []
    orphan = Orphan(listener, lambda *, taken_over: ended.append(taken_over), lambda: (0, 0))
    adoption = Adoption()
    assert await asyncio.to_thread(adoption.ask, os.getpid())
    assert adoption.listener is None
    orphan.close()
    adoption.release()
    assert ended == [False]


async def test_without_a_new_supervisor_a_worker_serves_while_clients_come() -> None:
    """However long: a supervisor may fail to start for hours. Once nobody needs it, it keeps no port."""
    ended: list[bool] = []
    asked = n_accepted = 0
    n_open = 1

    def clients() -> tuple[int, int]:
        nonlocal asked, n_accepted
        asked += 1
        n_accepted += n_open
        return n_accepted, 0

    with socket.create_server(("127.0.0.1", 0)) as listener:
        orphan = Orphan(listener, lambda *, taken_over: ended.append(taken_over), clients, orphan_s=0.05)
        await until(lambda: asked > 4)
        assert not ended
        n_open = 0
        await until(lambda: bool(ended))
        assert ended == [False]
        del orphan


async def test_a_stranger_with_the_name_of_a_worker_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process id or its user is another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        orphan = Orphan(listener, lambda **_: None, lambda: (0, 0))
        with monkeypatch.context() as planted:
            planted.setattr(orphans, "_name", lambda _: f"\0quantdrift-relay-{os.getpid()}")
            assert not await asyncio.to_thread(Adoption().ask, 1)
        with monkeypatch.context() as planted:
            planted.setattr(os, "geteuid", lambda: 12_345)
            assert not await asyncio.to_thread(Adoption().ask, os.getpid())
        orphan.close()


async def test_where_no_worker_is_left_there_is_nothing_to_adopt() -> None:
    """The usual start."""
    assert (await adopt("127.0.0.1:1")).listener is None
