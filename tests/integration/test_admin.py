"""The admin port."""

import socket

import aiohttp
import pytest

from quantdrift.core.admin import Admin

pytestmark = pytest.mark.integration


async def test_the_admin_port_may_be_an_ipv6_address() -> None:
    """Written as in a URL, as `sidecar.listen` is."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    admin = Admin("[::1]:0", lambda: True)
    await admin.start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://[::1]:{admin.port}/readyz") as answer,
        ):
            assert answer.status == 200
    finally:
        await admin.stop()
