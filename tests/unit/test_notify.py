"""Options of notifications that are refused, and the pauses of a webhook that is away."""

import pytest

from quantdrift.core.config.connections import connection_problems
from quantdrift.core.config.schema import Config, Notify
from quantdrift.monitor.notify.webhook import FIRST_S, LONGEST_S, pause_s

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("notify", "problem"),
    [
        (Notify(alertmanager=("http://am.example:9093",)), "notify.alertmanager is `http://am.example:9093`"),
        (Notify(alertmanager=("ftp://am",)), "notify.alertmanager is not the address of a server"),
        (
            Notify(webhook_url="http://on.example/", webhook_key_file="k"),
            "which is plaintext over a network",
        ),
        (Notify(webhook_url="https://on.example/"), "set without notify.webhook_key_file"),
        (Notify(key_file="k"), "notify.key_file is set without notify.certificate_file"),
    ],
)
def test_what_would_send_alerts_unprotected_or_unsigned_is_refused(notify: Notify, problem: str) -> None:
    """Plaintext over a network needs `+plaintext`, and a webhook needs a key to sign with."""
    (found,) = connection_problems(Config(notify=notify))
    assert problem in found


def test_notifications_on_this_machine_encrypted_and_plaintext_by_name_are_allowed() -> None:
    """The rule is that of all other connections."""
    notify = Notify(
        alertmanager=("http://127.0.0.1:9093", "https://am.example", "http+plaintext://am.mesh:9093"),
        webhook_url="https://on.example/",
        webhook_key_file="k",
    )
    assert not list(connection_problems(Config(notify=notify)))


def test_the_pauses_of_the_webhook_double_and_are_bounded() -> None:
    """Each lies between half of its nominal length and the whole, however often sending failed."""
    for attempts in (0, 1, 5, 8, 9, 10_000):
        nominal_s = min(FIRST_S * 2 ** min(attempts, 30), LONGEST_S)
        assert nominal_s / 2 <= pause_s(attempts) <= nominal_s
