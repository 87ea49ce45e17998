"""What a Postgres address may say, and what is refused by name."""

from pathlib import Path

import pytest

from quantdrift.core.config.load import Role, load, load_secrets
from quantdrift.core.errors import OperatorError
from quantdrift.storage.address import Address

pytestmark = pytest.mark.unit

PLACE = "postgresql://u:hunter2@h:5433/d"


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
        ("sslmode=verify-ca", "needs sslrootcert, or storage.ca_file"),
        ("sslmode=require&sslrootcert=system", "needs sslmode=verify-full"),
        ("sslmode=disable&sslrootcert=/x", r"contradicts sslrootcert \(storage.ca_file\)"),
        ("sslkey=/x", "without sslcert"),
        ("sslrootcert=/x&sslrootcert=/y", "given twice.*set storage.ca_file alone"),
    ],
)
def test_what_would_not_be_safe_or_understood_is_refused(query: str, said: str) -> None:
    """The message names it, and the right form, and shows no password."""
    with pytest.raises(OperatorError, match=said) as raised:
        Address.of(f"{PLACE}?{query}")
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
    address = Address.of(f"{PLACE}?{query}")
    assert address.tls is not None
    assert (address.tls.verified, address.tls.named, address.plaintext) == (verified, named, False)
    assert not address.url.query


def test_without_any_word_of_tls_the_driver_decides() -> None:
    """That is the plain address; `disable` is said to the driver."""
    plain = Address.of(PLACE)
    assert (plain.tls, plain.plaintext) == (None, False)
    disabled = Address.of(f"{PLACE}?sslmode=disable")
    assert (disabled.tls, disabled.plaintext) == (None, True)


def test_the_parts_are_the_same_on_every_way() -> None:
    """Password and hosts are read once; the address shows nothing of itself."""
    address = Address.of("postgres://u:p%40ss@/d?host=a:1&host=b:2&target_session_attrs=primary")
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
    "dsn",
    [
        "postgresql://u:p@h/d",
        "postgresql://u:p?q@h/d",
        "postgresql://h/d?target_session_attrs=any",
        "postgresql://u:p@h/d?user=a@b",
        "postgresql:///d?host=/run/postgresql",
    ],
)
def test_the_options_become_part_of_every_address(dsn: str, tmp_path: Path) -> None:
    """Wherever `?` and `@` stand in it, and whatever signs are in the path."""
    (tmp_path / "config.toml").write_text('[storage]\nca_file = "a b&c?.pem"\n')
    config = load(tmp_path / "config.toml", {})
    address = Address.of(load_secrets(config, Role.SHADOW, {"QUANTDRIFT_DSN": dsn}).dsn)
    assert address.tls is not None
    assert address.tls.ca_file == str(tmp_path / "a b&c?.pem")
    without = Address.of(dsn)
    assert (without.tls, without.arguments) == (None, address.arguments)


def test_a_file_that_is_named_in_both_places_is_refused(tmp_path: Path) -> None:
    """Neither silently wins."""
    (tmp_path / "config.toml").write_text('[storage]\nca_file = "ca.pem"\n')
    config = load(tmp_path / "config.toml", {})
    secrets = load_secrets(config, Role.SHADOW, {"QUANTDRIFT_DSN": f"{PLACE}?sslrootcert=/x"})
    with pytest.raises(OperatorError, match="`sslrootcert` is given twice"):
        Address.of(secrets.dsn)


@pytest.mark.parametrize("section", ["stream", "storage"])
def test_a_key_needs_its_certificate(section: str, tmp_path: Path) -> None:
    """Said when the configuration is read."""
    (tmp_path / "config.toml").write_text(f'[{section}]\nkey_file = "key.pem"\n')
    with pytest.raises(
        OperatorError, match=rf"{section}\.key_file is set without {section}\.certificate_file"
    ):
        load(tmp_path / "config.toml", {})
