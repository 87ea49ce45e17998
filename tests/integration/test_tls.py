"""What is read of certificates that others make."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quantdrift.core.config.schema import Config, Intake, Stream
from quantdrift.core.tls import certificate_ends
from tests.support.certificates import Authority

pytestmark = pytest.mark.integration


def test_each_certificate_of_the_configuration_has_an_end(tmp_path: Path) -> None:
    """Of our own it is the first one in the file, of authorities the one that lasts longest; what cannot be read is left out."""
    authority = Authority(tmp_path / "a")
    good, over = authority.sign("good"), authority.sign("over", expired=True)
    chain, authorities = tmp_path / "chain.pem", tmp_path / "authorities.pem"
    chain.write_text(over.certificate.read_text() + authority.file.read_text())
    authorities.write_text(over.certificate.read_text() + "words between them\n" + authority.file.read_text())
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    stream = Stream(ca_file=str(authorities), certificate_file=str(good.certificate), key_file=str(good.key))
    intake = Intake(certificate_file=str(chain), client_ca_file=str(garbage))
    ends = dict(certificate_ends(Config(stream=stream, intake=intake)))
    now, day = datetime.now(UTC), timedelta(days=1)
    assert set(ends) == {"stream.ca_file", "stream.certificate_file", "intake.certificate_file"}
    assert ends["stream.ca_file"] - now > day
    assert now < ends["stream.certificate_file"] < now + 3 * day
    assert ends["intake.certificate_file"] < now
