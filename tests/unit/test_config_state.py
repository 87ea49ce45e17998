"""The options that the audit stores: without defaults, and without credentials."""

import pytest

from quantdrift.core.config.connections import connection_problems, connections
from quantdrift.core.config.schema import (
    Capture,
    Config,
    Model,
    Notify,
    SamplingOptions,
    Slice,
    Stream,
    TelemetryOptions,
)
from quantdrift.core.config.state import (
    changed_options,
    config_digest,
    config_state,
    shared_digest,
    shown_config,
)

pytestmark = pytest.mark.unit


def test_only_what_differs_from_its_default_is_named() -> None:
    """A model's options stand under its name."""
    assert config_state(Config()) == {}
    state = config_state(Config(models=(Model(name="digits", share=0.5),)))
    assert state == {"models.digits.name": "digits", "models.digits.share": 0.5}


@pytest.mark.parametrize(
    "url",
    [
        "nats://user:canary@host:4222",
        "nats://user:can/ary@host:4222,nats://b:canary@c:1",
        "https://host:4317/?token=canary@x",
        "nats://user:canary?x@host",
    ],
)
def test_no_credentials_are_stored(url: str) -> None:
    """Of an address with a user or parameters only the scheme is left, whatever signs the password has."""
    options = config_state(Config(stream=Stream(url=url), telemetry=TelemetryOptions(otlp_endpoint=url)))
    scheme = url.partition("://")[0]
    assert set(options.values()) == {f"{scheme}://(not shown)"}


def test_the_path_of_a_webhook_is_stored_and_shown_nowhere() -> None:
    """For most chats it is the password; that it has changed can be seen."""
    url = "https://hooks.chat.example:8443/services/T0/{}"
    configs = [Config(notify=Notify(webhook_url=url.format(f"canary{n}"))) for n in range(2)]
    states = [config_state(config) for config in configs]
    assert "https://hooks.chat.example:8443/" in states[0]["notify.webhook_url"]
    assert changed_options(*states) == ["notify.webhook_url"]
    (connection,) = [one for one in connections(configs[0]) if one.to.startswith("notify.")]
    plaintext = Config(notify=Notify(webhook_url="http://hooks.chat.example/canary0"))
    words = [*states, shown_config(configs[0]), connection.to, *connection_problems(plaintext)]
    assert "canary" not in str(words)
    assert connection.to.endswith("https://hooks.chat.example:8443")


def test_what_changed_is_named_in_both_directions() -> None:
    """An option that goes back to its default has changed, too; the digest changes with any of them."""
    before, after = {"a": 1, "b": 2}, {"b": 3, "c": 4}
    assert changed_options(before, after) == ["a", "b", "c"]
    assert config_digest(before) != config_digest(after)
    assert config_digest({"a": 1, "b": 2}) == config_digest({"b": 2, "a": 1})


def test_the_shared_digest_is_of_what_all_parts_must_have_alike() -> None:
    """Not of addresses and limits, in which they differ by design."""
    digest = shared_digest(Config())
    assert (
        shared_digest(Config(stream=Stream(url="nats://h:1"), capture=Capture(hmac_key_file="k"))) == digest
    )
    changes = (
        {"models": (Model(name="digits"),)},
        {"slices": (Slice(name="s", header="x-s"),)},
        {"sampling": SamplingOptions(rate=0.5)},
        {"capture": Capture(headers=("x-s",))},
    )
    digests = {shared_digest(Config(**change)) for change in changes}
    assert len(digests | {digest}) == 5
