"""What a Postgres address may say, and what is refused by name."""

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from quantdrift.core.config.load import load
from quantdrift.core.errors import OperatorError
from quantdrift.storage.address import PostgresAddress

pytestmark = pytest.mark.unit

PLACE = "postgresql://u:hunter2@h:5433/d"
HERE = "postgresql://u:hunter2@localhost:5433/d"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sslmode=prefer", "falls back to plaintext: write sslmode=verify-full"),
        ("sslmode=allow", "falls back to plaintext"),
        ("sslmode=verify_full", "one of disable, require, verify-ca, verify-full"),
        ("sslmode=", "`sslmode` in the Postgres address is empty"),
        ("sslmode=require&sslmode=disable", "`sslmode` is given twice"),
        ("ssl=require", r"`ssl` in the Postgres address is not understood: write sslmode=disable\|require"),
        ("ssl=", "`ssl` in the Postgres address is not understood"),
        ("sslcrl=/x", "`sslcrl` in the Postgres address is not understood: remove it"),
        ("application_name=x", "`application_name` in the Postgres address is not understood"),
        ("sslmode=verify-ca", "needs sslrootcert: the file of the authority"),
        ("sslmode=require&sslrootcert=system", "needs sslmode=verify-full"),
        ("sslmode=disable&sslrootcert=/x", "contradicts sslrootcert: write sslmode=verify-full"),
        ("sslkey=/x", "without sslcert"),
        ("sslrootcert=/x&sslrootcert=/y", "given twice.*name it there once"),
    ],
)
def test_what_would_not_be_safe_or_understood_is_refused(query: str, said: str) -> None:
    """The message names it, and the right form, and shows no password."""
    with pytest.raises(OperatorError, match=said) as raised:
        PostgresAddress.of(f"{PLACE}?{query}")
    assert "hunter2" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("query", "verified", "named"),
    [
        ("sslmode=require", False, False),
        ("sslmode=require&sslrootcert=/x", True, False),
        ("sslmode=verify-ca&sslrootcert=/x", True, False),
        ("sslmode=verify-full", True, True),
        ("sslmode=verify-full&sslrootcert=system", True, True),
        ("sslrootcert=/x", True, True),
        ("sslcert=/x", True, True),
    ],
)
def test_the_modes_mean_what_they_mean_to_libpq(query: str, verified: bool, named: bool) -> None:  # noqa: FBT001
    """A file without a mode is `verify-full`."""
    address = PostgresAddress.of(f"{PLACE}?{query}")
    assert address.tls is not None
    assert (address.tls.verified, address.tls.named, address.plaintext) == (verified, named, False)
    assert not address.url.query


def test_without_any_word_of_tls_the_driver_decides() -> None:
    """That is the plain address of a server on this machine; `disable` is said to the driver."""
    plain = PostgresAddress.of(HERE)
    assert (plain.tls, plain.plaintext) == (None, False)
    disabled = PostgresAddress.of(f"{PLACE}?sslmode=disable")
    assert (disabled.tls, disabled.plaintext) == (None, True)


def test_the_parts_are_the_same_on_every_way() -> None:
    """Password and hosts are read once; the address shows nothing of itself."""
    address = PostgresAddress.of(
        "postgres://u:p%40ss@/d?host=a:1&host=b:2&target_session_attrs=primary&sslmode=disable"
    )
    assert address.arguments == {
        "user": "u",
        "password": "p@ss",
        "database": "d",
        "host": ["a", "b"],
        "port": [1, 2],
        "target_session_attrs": "primary",
    }
    assert repr(address) == "Address(...)"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("sslmode=disable", {"sslmode": "disable"}),
        ("sslmode=require", {"sslmode": "require"}),
        ("sslmode=require&sslrootcert=/x", {"sslmode": "verify-ca", "sslrootcert": "/x"}),
        ("sslmode=verify-full", {"sslmode": "verify-full", "sslrootcert": "system"}),
        (
            "sslcert=/x",
            {"sslmode": "verify-full", "sslrootcert": "system", "sslcert": "/x", "sslkey": "/x"},
        ),
    ],
)
def test_libpq_gets_the_same_address_and_checks_as_much(query: str, expected: dict[str, str]) -> None:
    """What libpq would read otherwise is written out: a key in the file of its certificate, the system's authorities."""
    parts = dict(parse_qsl(urlsplit(PostgresAddress.of(f"{PLACE}?{query}").libpq).query))
    assert {name: value for name, value in parts.items() if name.startswith("ssl")} == expected


def test_libpq_gets_several_servers_in_its_own_form() -> None:
    """And a password with any character."""
    address = PostgresAddress.of("postgres://u:p%40s%20+@/d?host=a:1&host=b:2&sslmode=disable")
    assert dict(parse_qsl(urlsplit(address.libpq).query.replace("+", "%2B"))) == {
        "host": "a,b",
        "port": "1,2",
        "user": "u",
        "password": "p@s +",
        "dbname": "d",
        "sslmode": "disable",
    }


def test_a_key_needs_its_certificate(tmp_path: Path) -> None:
    """Said when the configuration is read."""
    (tmp_path / "config.toml").write_text('[stream]\nkey_file = "key.pem"\n')
    with pytest.raises(OperatorError, match=r"stream\.key_file is set without stream\.certificate_file"):
        load(tmp_path / "config.toml", {})


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("postgresql://u:hunter2@db.example/d", False),
        ("postgresql://u:hunter2@10.0.0.1/d", False),
        ("postgresql://u:hunter2@127.0.0.1.example/d", False),
        ("postgresql://u:hunter2@localhost.example/d", False),
        ("postgresql://u:hunter2@127.0.0.1/d?host=db.example", False),
        ("postgresql://u:hunter2@/d?host=localhost:1&host=db.example:2", False),
        ("postgresql://u:hunter2@LOCALHOST/d", True),
        ("postgresql://u:hunter2@127.0.0.9/d", True),
        ("postgresql://u:hunter2@[::1]:5432/d", True),
        ("postgresql://u:hunter2@/d?host=/run/postgresql", True),
        ("postgresql:///d", True),
    ],
)
def test_without_sslmode_only_a_server_on_this_machine_is_allowed(
    address: str,
    is_local: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message says what to write, and shows no password; `sslmode=disable` allows plaintext by name."""
    monkeypatch.delenv("PGHOST", raising=False)
    if is_local:
        assert PostgresAddress.of(address).protection == "plaintext on this machine"
        return
    with pytest.raises(OperatorError, match="is not this machine: write sslmode=verify-full") as raised:
        PostgresAddress.of(address)
    assert "hunter2" not in str(raised.value)
    disabled = PostgresAddress.of(f"{address}{'&' if '?' in address else '?'}sslmode=disable")
    assert "PLAINTEXT" in disabled.protection


def test_a_host_from_the_environment_of_libpq_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads PGHOST where the address names no host."""
    monkeypatch.setenv("PGHOST", "db.example")
    with pytest.raises(OperatorError, match=r"db\.example:5432 is not this machine"):
        PostgresAddress.of("postgresql:///d")
