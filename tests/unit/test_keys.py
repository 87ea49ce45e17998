"""Key files, and the encryption of exchanges with their keys."""

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.clock import ManualClock
from quantdrift.core.codec import decode_exchange, encode
from quantdrift.core.config.schema import Capture, Config, Slice, Stream
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from quantdrift.core.keys import Key, KeyFile, KeyRing, load_keys, read_keys, write_keys
from quantdrift.core.sealing import SEALED_BYTES, Envelope, envelope_of, is_sealed, seal, unseal
from quantdrift.core.slices import SliceAssigner
from quantdrift.core.telemetry import keys_since
from quantdrift.sidecar.capture.attributes import Attributes, KeyedHash
from tests.support.shadow.onnx_models import exchange_of, inputs_of

pytestmark = pytest.mark.unit

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
ID = "a" * 32


def ring_of(*keys: Key) -> KeyRing:
    """Return a ring."""
    return KeyRing(keys=keys)


def test_only_the_key_opens_a_message_and_only_for_its_model() -> None:
    """Nothing of the message can be read; a change of any byte, another model and another id are all found."""
    key = Key.create(NOW)
    wire = encode(exchange_of(inputs_of(2), attributes={"header.x": "CANARY"}))
    sealed = seal(wire, key, model="digits", exchange_id=ID)
    assert is_sealed(sealed)
    assert b"CANARY" not in sealed
    assert len(sealed) - len(wire) <= SEALED_BYTES + 2 * len("digits")
    assert unseal(sealed, ring_of(Key.create(NOW), key), "digits") == wire
    assert decode_exchange(unseal(sealed, ring_of(key), "digits")).attributes == {"header.x": "CANARY"}
    moved = sealed.replace(b"digits", b"wagons")
    others = [sealed.replace(ID.encode(), b"b" * 32), sealed[:-1] + bytes([sealed[-1] ^ 1]), moved]
    for changed, model in zip(others, ("digits", "digits", "wagons"), strict=True):
        with pytest.raises(QuarantineError, match="its key does not open it") as found:
            unseal(changed, ring_of(key), model)
        assert found.value.reason is QuarantineReason.ENCRYPTED
    with pytest.raises(QuarantineError, match="belongs to another model"):
        unseal(sealed, ring_of(key), "wagons")
    with pytest.raises(QuarantineError, match="keep old keys") as missing:
        unseal(sealed, ring_of(Key.create(NOW)), "digits")
    assert missing.value.reason is QuarantineReason.ENCRYPTED


def test_who_has_what_a_sidecar_has_opens_nothing(tmp_path: Path) -> None:
    """Neither its own messages nor those of others: the public half encrypts for the shadow, which goes on opening what older keys made."""
    secret, public = tmp_path / "shadow.json", tmp_path / "sidecar.json"
    for words in (("new", str(secret)), ("public", str(secret), str(public))):
        done = CliRunner().invoke(main, ["keys", *words])
        assert done.exit_code == 0, done.output
    assert stat.S_IMODE(public.stat().st_mode) == 0o600
    shadow, sidecar = (load_keys(path, "stream.payload_key_file") for path in (secret, public))
    (key,) = sidecar.keys
    assert not key.secret
    older = Key.create(NOW)
    wire = encode(exchange_of(inputs_of(2), attributes={"header.x": "CANARY"}))
    sealed, again, before = (seal(wire, by, model="digits", exchange_id=ID) for by in (key, key, older))
    assert b"CANARY" not in sealed
    assert sealed != again
    assert len(sealed) - len(wire) <= SEALED_BYTES + 2 * len("digits")
    opening = shadow.joined(ring_of(older))
    assert [unseal(message, opening, "digits") for message in (sealed, again, before)] == [wire] * 3
    by_shadow = seal(wire, shadow.keys[0], model="digits", exchange_id=ID)
    for message in (sealed, by_shadow):
        with pytest.raises(QuarantineError, match="is a public key here, which opens nothing") as refused:
            unseal(message, sidecar, "digits")
        assert refused.value.reason is QuarantineReason.ENCRYPTED
    own = envelope_of(sealed).nonce[:32]
    for changed in (
        sealed[:-1] + bytes([sealed[-1] ^ 1]),
        sealed.replace(own, bytes(32)),
        sealed.replace(own, own[::-1]),
    ):
        with pytest.raises(QuarantineError, match="its key does not open it"):
            unseal(changed, shadow, "digits")
    with pytest.raises(OperatorError, match="only encrypt payloads"):
        load_keys(public, "capture.hmac_key_file")
    rotated = CliRunner().invoke(main, ["keys", "rotate", str(public)])
    assert (rotated.exit_code, "public keys" in rotated.output) == (2, True)


def test_joined_keys_open_and_make_nothing(tmp_path: Path) -> None:
    """A file gets the keys of others, once; its own goes on making what is new, however old it is, and rotated ones are added."""
    own, others = tmp_path / "shadow.json", [tmp_path / "a.json", tmp_path / "b.json"]

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["keys", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    for file in (own, *others):
        run("new", str(file))
    run("rotate", str(others[0]), "--after", "1s")
    made = [key for file in others for key in load_keys(file, "").keys]
    before = load_keys(own, "")
    for _ in range(2):
        run("join", str(own), *map(str, others))
    ring = load_keys(own, "")
    assert {key.id for key in ring.keys} == {key.id for key in (*made, *before.keys)}
    assert len(ring.keys) == 4
    assert ring.current(datetime.now(UTC)) == before.keys[0]
    assert ring.current(NOW - timedelta(days=9)) == before.keys[0], "whatever the clock says"
    for key in made:
        assert unseal(seal(b"x", key, model="m", exchange_id=ID), ring, "m") == b"x"
    assert "is not a key file" in run("join", str(own), __file__, code=2)


@pytest.mark.parametrize("end", range(0, 60, 7))
def test_a_damaged_envelope_is_quarantined(end: int) -> None:
    """Whatever arrives ends in a reason of the closed set."""
    key = Key.create(NOW)
    sealed = seal(b"message", key, model="m", exchange_id=ID)
    with pytest.raises(QuarantineError):
        unseal(sealed[:end], ring_of(key), "m")


@pytest.mark.parametrize("n_bytes", [0, 1, 1_000, (1 << 16) - 16, (1 << 16) - 15, 1 << 20])
def test_messages_of_any_length_are_opened(n_bytes: int) -> None:
    """Short ones are decrypted by another call than long ones: either opens what was sealed, and finds a changed byte."""
    key = Key.create(NOW)
    sealed = seal(bytes(n_bytes), key, model="m", exchange_id=ID)
    assert unseal(sealed, ring_of(key), "m") == bytes(n_bytes)
    with pytest.raises(QuarantineError, match="its key does not open it"):
        unseal(sealed[:-1] + bytes([sealed[-1] ^ 1]), ring_of(key), "m")


@pytest.mark.parametrize(("n_nonce", "n_data"), [(0, 40), (23, 40), (24, 0), (24, 15)])
def test_a_short_nonce_or_message_is_quarantined(n_nonce: int, n_data: int) -> None:
    """Nothing beyond the end of what a sender wrote is read."""
    key = Key.create(NOW)
    envelope = Envelope(key_id=key.id, model="m", exchange_id=ID, nonce=bytes(n_nonce), data=bytes(n_data))
    with pytest.raises(QuarantineError, match="its key does not open it"):
        unseal(b"S\x01" + msgspec.msgpack.encode(envelope), ring_of(key), "m")


def test_each_message_has_a_nonce_of_its_own() -> None:
    """The same message under the same key is never the same ciphertext."""
    key = Key.create(NOW)
    sealed = [envelope_of(seal(b"same", key, model="m", exchange_id=ID)) for _ in range(100)]
    assert len({one.nonce for one in sealed}) == len({one.data for one in sealed}) == 100
    assert {len(one.nonce) for one in sealed} == {24}


def test_a_new_key_waits_until_all_processes_can_have_it() -> None:
    """Before that the old one is used, also by a process that has the new file already."""
    old, new = Key.create(NOW), Key.create(NOW + timedelta(days=1), wait_s=600)
    ring = ring_of(old, new)
    assert ring.current(NOW + timedelta(days=1, seconds=599)) is old
    assert ring.current(NOW + timedelta(days=1, seconds=600)) is new
    assert ring.current(NOW - timedelta(hours=1)) is old, "a clock that is behind finds a key all the same"
    assert ring.find(old.id) is old


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No restart is needed; a file that is gone or damaged leaves the keys in use."""
    path, clock = tmp_path / "keys.json", ManualClock(NOW)
    file = KeyFile(str(path), "stream.payload_key_file", clock)
    assert file.current is None
    assert "stream.payload_key_file" in caplog.text
    first = Key.create(clock.now())
    write_keys(path, ring_of(first), is_new=True)
    clock.advance(1)
    assert file.current == first
    second = Key.create(clock.now(), wait_s=10)
    write_keys(path, ring_of(first, second))
    clock.advance(1)
    assert (file.current, file.ring) == (first, ring_of(first, second))
    clock.advance(10)
    assert file.current == second
    path.write_text("{}")
    clock.advance(1)
    assert file.current == second
    path.unlink()
    clock.advance(1)
    assert file.current == second
    assert "the keys read before stay in use" in caplog.text


def test_the_commands_create_rotate_and_remove_and_print_no_key(tmp_path: Path) -> None:
    """The file belongs to its owner alone, and the key in use is not removed."""
    path = tmp_path / "keys.json"

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["keys", *arguments])
        assert result.exit_code == code, result.output
        return result.output

    printed = run("new", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (first,) = load_keys(path, "FILE").keys
    assert f"{first.id}  0.0 h" in printed
    assert "in use" in printed
    assert "keys rotate" in run("new", str(path), code=2)
    printed += run("rotate", str(path), "--after", "1h")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    _, second = load_keys(path, "FILE").keys
    assert "waiting" in printed
    assert "is in use" in run("remove", str(path), first.id, code=2)
    assert "no key k00000000" in run("remove", str(path), "k00000000", code=2)
    printed += run("list", str(path)) + run("list", str(path), "--json") + run("remove", str(path), second.id)
    assert load_keys(path, "FILE").keys == (first,)
    document = path.read_text()
    for key in (first, second):
        for shown in (key.secret.hex(), repr(key.secret)):
            assert shown not in printed
    assert document.split('"secret": "')[1].split('"')[0] not in printed


def test_a_quarantined_message_can_be_opened_by_a_person(tmp_path: Path) -> None:
    """Psql prints the column in hexadecimal; the command takes that as it is."""
    path, key = tmp_path / "keys.json", Key.create(NOW)
    write_keys(path, ring_of(key), is_new=True)
    sealed = seal(b"message", key, model="m", exchange_id="")
    for given in (sealed, b"\\x" + sealed.hex().encode() + b"\n"):
        result = CliRunner().invoke(main, ["keys", "open", str(path)], input=given)
        assert (result.exit_code, result.stdout_bytes) == (0, b"message")
    result = CliRunner().invoke(main, ["keys", "open", str(path)], input=b"plain")
    assert result.exit_code == 2


def test_an_error_about_a_key_file_quotes_nothing_of_it() -> None:
    """It names the option and the file, and says what to do."""
    for text in (b'{"keys":[]}', b'{"keys":[{"id":"SECRET"}]}', b"SECRET"):
        with pytest.raises(OperatorError, match=r"stream\.payload_key_file: f") as found:
            read_keys(text, "stream.payload_key_file", "f")
        assert "SECRET" not in str(found.value)


def test_a_hashed_value_says_which_key_hashed_it(tmp_path: Path) -> None:
    """Equal values are equal until the next key is used; then the same value is another one, and can be told apart."""
    path, clock = tmp_path / "keys.json", ManualClock(NOW)
    old, new = Key.create(clock.now()), Key.create(clock.now(), wait_s=10)
    write_keys(path, ring_of(old, new), is_new=True)
    keyed_hash = KeyedHash(b"", KeyFile(str(path), "capture.hmac_key_file", clock))
    attributes = Attributes(Capture(headers=("x-user",), hmac=("header.x-user",)), keyed_hash)

    def value() -> str:
        return attributes.pick({"x-user": "anna"}, {}, {})["header.x-user"]

    before = value()
    assert before == value()
    assert before.startswith(f"{old.id}:")
    assert "anna" not in before
    clock.advance(10)
    assert value().startswith(f"{new.id}:")
    assert value().partition(":")[2] != before.partition(":")[2]
    rules = (Slice(name="user", header="x-user"), Slice(name="anna", header="x-user", values=(before,)))
    assigner = SliceAssigner(Config(slices=rules), "digits")
    assert [key.name for key in assigner.assign({"header.x-user": before}, {})] == [
        "all",
        f"user={before}",
        f"anna={before}",
    ]
    assert [key.name for key in assigner.assign({"header.x-user": value()}, {})] == [
        "all",
        f"user={value()}",
    ], "slices of the old hashes get nothing more, those of the new ones begin without a past"
    plain = KeyedHash(b"any text")("anna")
    assert len(plain) == 32, "a key that is plain text has no id, as before"


def test_config_check_names_a_key_file_that_cannot_be_used(tmp_path: Path) -> None:
    """It says which option names it, and what to do; a usable file of one's own is not mentioned."""
    config, path = tmp_path / "config.toml", tmp_path / "keys.json"
    config.write_text('[stream]\npayload_key_file = "keys.json"\n[sidecar]\nbackend = "example.invalid:80"\n')

    def notes() -> str:
        result = CliRunner().invoke(main, ["config", "check", "-c", str(config), "--json"])
        assert result.exit_code == 0, result.output
        return " ".join(json.loads(result.stdout)["notes"])

    assert "stream.payload_key_file" in notes()
    path.write_text("SECRET")
    assert "`quantdrift keys new FILE`" in notes()
    assert "SECRET" not in notes()
    path.unlink()
    write_keys(path, ring_of(Key.create(NOW)), is_new=True)
    assert "keys.json" not in notes()
    path.chmod(0o644)
    assert f"chmod 600 {path}" in notes()


def test_the_age_of_the_key_in_use_is_known_of_each_key_file(tmp_path: Path) -> None:
    """A newer key that is not used yet changes nothing, and neither does a plain text or a file that is not there."""
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    first, next_ = Key.create(begun), Key.create(begun + timedelta(days=400), wait_s=600.0)
    file, text = tmp_path / "keys.json", tmp_path / "key"
    write_keys(file, KeyRing(keys=(first, next_)), is_new=True)
    text.write_text("a plain text")
    stream = Stream(payload_key_file=str(file))
    config = Config(stream=stream, capture=Capture(hmac_key_file=str(text)))
    assert list(keys_since(config, next_.created)) == [("stream.payload_key_file", begun)]
    assert list(keys_since(config, next_.used_from)) == [("stream.payload_key_file", next_.used_from)]
    file.unlink()
    assert list(keys_since(config, begun)) == []
