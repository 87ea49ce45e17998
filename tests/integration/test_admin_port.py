"""The admin port."""

import socket

import aiohttp
import pytest

from quantdrift.core.errors import OperatorError
from quantdrift.core.process.admin import Admin

pytestmark = pytest.mark.integration


async def test_the_admin_port_may_be_an_ipv6_address() -> None:
    """Written as in a URL, as `sidecar.listen` is."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    admin = Admin("monitor.admin", "[::1]:0", lambda: True)
    await admin.start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://[::1]:{admin.port}/readyz") as answer,
        ):
            assert answer.status == 200
    finally:
        await admin.stop()


async def test_a_port_that_is_taken_is_an_error_with_the_option_and_the_address() -> None:
    """A person must act: not a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            OperatorError, match=f"shadow.admin {address} cannot be opened: address already in use"
        ):
            await Admin("shadow.admin", address, lambda: True).start()


async def test_a_name_that_somebody_pointed_here_reads_nothing() -> None:
    """DNS rebinding: a page in the browser of a developer asks loopback under a name of its own."""
    admin = Admin("monitor.admin", "127.0.0.1:0", lambda: True)
    await admin.start()
    statuses = {}
    try:
        async with aiohttp.ClientSession() as session:
            for host in (
                "evil.example",
                f"evil.example:{admin.port}",
                "127.0.0.1",
                f"localhost:{admin.port}",
                "[::1]",
            ):
                for path in ("metrics", "readyz"):
                    url = f"http://127.0.0.1:{admin.port}/{path}"
                    async with session.get(url, headers={"Host": host}) as answer:
                        statuses[host, path] = answer.status
    finally:
        await admin.stop()
    assert {host for (host, _), status in statuses.items() if status == 421} == {
        "evil.example",
        f"evil.example:{admin.port}",
    }
    assert set(statuses.values()) == {200, 421}
