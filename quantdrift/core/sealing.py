"""Encryption of exchanges: between sidecar and shadow, and in the quarantine.

The cipher is XChaCha20-Poly1305 (draft-irtf-cfrg-xchacha-03; libsodium's, by PyNaCl), which also detects every change. Each
message has a random nonce of 192 bits. Any number of sidecars may share a key: the probability that two of n messages
under one key have the same nonce is below n^2 / 2^193, that is 2^-33 after 2^80 messages (section 2.1 of that draft), so
no process has to count or to coordinate. A key is replaced because it may have become known, not because it is used up.

A sidecar may have the public half of the shadow's key alone. Then each message has a key of its own: the X25519 agreement of a key pair
that is made for it with the public one, through BLAKE2b (as libsodium's sealed boxes, which authenticate no further data). Who has what
a sidecar has opens nothing, not even what that sidecar has sent.

The model and the id of the exchange stay readable in the envelope. They are authenticated with the message: a ciphertext
that is moved to another model, or gets another id, cannot be opened.
"""

import ctypes
import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Final

import msgspec
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_ABYTES as TAG_BYTES,
)
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt as decrypt,
)
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_encrypt as encrypt,
)
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_KEYBYTES as KEY_BYTES,
)
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_NPUBBYTES as NONCE_BYTES,
)
from nacl.bindings import crypto_scalarmult as agreement
from nacl.bindings import crypto_scalarmult_base as base
from nacl.exceptions import CryptoError
from nacl.utils import random

from quantdrift.core.errors import QuarantineError, QuarantineReason
from quantdrift.core.keys import Key, KeyRing

_HEAD: Final = b"S\x01"  # the kind of the record and its version, as in `quantdrift.core.codec`
_TO_PUBLIC: Final = b"S\x02"
_PURPOSE: Final = b"quantdrift payload 1"
_BOX: Final = b"quantdrift payload box 1"
_POINT_BYTES: Final = 32
_SMALL_BYTES: Final = 1 << 16
SEALED_BYTES: Final = 176
"""An encrypted message is at most this much longer than the plain one, with the name of its model twice."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """An encrypted message with what may be read of it.

    Parameters
    ----------
    key_id, model, exchange_id
        The key, the model and the exchange; the last is empty if it was not known.
    nonce, data
        24 random bytes, after the public key of the message if it was encrypted to one; the ciphertext with its tag.
    """

    key_id: str
    model: str
    exchange_id: str
    nonce: bytes
    data: bytes


_DECODER = msgspec.msgpack.Decoder(Envelope)


def is_sealed(wire: bytes) -> bool:
    """Return whether a message is encrypted."""
    return wire[:1] == _HEAD[:1]


def seal(wire: bytes, key: Key, *, model: str, exchange_id: str) -> bytes:
    """Return a message encrypted for one model and one exchange."""
    nonce, own, head = random(NONCE_BYTES), b"", _HEAD
    if key.public:
        secret = random(_POINT_BYTES)
        own, head = base(secret), _TO_PUBLIC
        message_key = _agreed(agreement(secret, key.public), own, key.public)
    else:
        message_key = key.derived(_PURPOSE)
    data = encrypt(wire, _bound(key.id, model, exchange_id), nonce, message_key)
    envelope = Envelope(key_id=key.id, model=model, exchange_id=exchange_id, nonce=own + nonce, data=data)
    return head + msgspec.msgpack.encode(envelope)


def public_half(ring: KeyRing) -> KeyRing:
    """Return the keys of a ring that make what is new, without their secrets: they encrypt for who has the ring, and open nothing."""
    return KeyRing(
        keys=tuple(
            msgspec.structs.replace(key, secret=b"", public=key.public or base(key.derived(_BOX)))
            for key in ring.making
        )
    )


def envelope_of(wire: bytes) -> Envelope:
    """Return the envelope of an encrypted message; nothing of it is verified.

    Raises
    ------
    QuarantineError
        Reason `decode`: it is none.
    """
    if wire[:2] not in {_HEAD, _TO_PUBLIC}:
        raise QuarantineError(QuarantineReason.DECODE, "not an encrypted message of a version that is known")
    try:
        return _DECODER.decode(memoryview(wire)[2:])
    except msgspec.MsgspecError as error:
        raise QuarantineError(
            QuarantineReason.DECODE, "the envelope of an encrypted message is damaged"
        ) from error


def unseal(wire: bytes, ring: KeyRing, model: str) -> bytes:
    """Return the message of an envelope for `model`, verified.

    Raises
    ------
    QuarantineError
        Reason `decode`: it is no envelope, or one for another model. Reason `encrypted`: the key is missing here, or the
        message was changed.
    """
    envelope = envelope_of(wire)
    if envelope.model != model:
        raise QuarantineError(QuarantineReason.DECODE, "the encrypted message belongs to another model")
    key = ring.find(envelope.key_id)
    if key is None:
        raise QuarantineError(
            QuarantineReason.ENCRYPTED,
            "no key of stream.payload_key_file has the id of its key: keep old keys until nothing needs them",
        )
    if not key.secret:
        raise QuarantineError(
            QuarantineReason.ENCRYPTED,
            f"{key.id} is a public key here, which opens nothing: use the file with its secret",
        )
    own, nonce = envelope.nonce[:-NONCE_BYTES], envelope.nonce[-NONCE_BYTES:]
    try:
        message_key = key.derived(_PURPOSE)
        if wire[:2] == _TO_PUBLIC:
            secret = key.derived(_BOX)
            message_key = _agreed(agreement(secret, own), own, base(secret))
        return _decrypted(envelope.data, _bound(key.id, model, envelope.exchange_id), nonce, message_key)
    except (CryptoError, ValueError, TypeError) as error:
        raise QuarantineError(
            QuarantineReason.ENCRYPTED, "its key does not open it: it was changed, or is not what it says"
        ) from error


def _small_decryption() -> Callable[..., int] | None:
    """Return libsodium's function itself, for messages that take less time than to change threads; None: it is not where it usually is.

    The binding lets another thread run during each call. For a message of 1 kB, whose decryption takes a microsecond, that costs ten
    times as much as the call. This is the same function of the same library, and keeps the interpreter's lock.
    """
    try:
        library = ctypes.PyDLL(import_module("nacl._sodium").__file__)
        function = library.crypto_aead_xchacha20poly1305_ietf_decrypt
    except (ImportError, AttributeError, OSError):
        return None
    function.argtypes = (
        *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p),  # the message, its length, unused
        *(ctypes.c_char_p, ctypes.c_ulonglong),  # the ciphertext
        *(ctypes.c_char_p, ctypes.c_ulonglong),  # what is authenticated with it
        *(ctypes.c_char_p, ctypes.c_char_p),  # nonce and key
    )
    return function


_decrypt_small: Final = _small_decryption()


def _decrypted(data: bytes, bound: bytes, nonce: bytes, key: bytes) -> bytes:
    is_small = TAG_BYTES <= len(data) <= _SMALL_BYTES
    if _decrypt_small is None or not is_small or len(nonce) != NONCE_BYTES or len(key) != KEY_BYTES:
        return bytes(decrypt(data, bound, nonce, key))
    message = ctypes.create_string_buffer(len(data) - TAG_BYTES)
    if _decrypt_small(message, None, None, data, len(data), bound, len(bound), nonce, key):
        raise CryptoError("the tag does not fit")
    return message.raw


def _agreed(shared: bytes, own: bytes, public: bytes) -> bytes:
    return hashlib.blake2b(own + public, key=shared, digest_size=32, person=b"qd payload box 1").digest()


def _bound(key_id: str, model: str, exchange_id: str) -> bytes:
    """Return the authenticated part, unambiguous for any texts."""
    return msgspec.msgpack.encode((_PURPOSE, key_id, model, exchange_id))
