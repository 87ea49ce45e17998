"""The systemd units: of every role, and of the weekly report."""

import configparser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.cli.run.up import SERVERS_GRACE_S
from quantdrift.core.config.schema import Sidecar
from quantdrift.core.process.run import GRACE_S

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[2] / "deploy"


def _unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "systemd" / name).read_text(encoding="utf-8"))
    return parser


ROLES = ("monitor", "shadow", "sidecar", "up", "web")


@pytest.mark.parametrize("name", ROLES)
def test_each_role_is_started_again_for_ever_and_has_time_to_end(name: str) -> None:
    """The command line knows every word, a missing Postgres ends no unit, and a stop waits for what the process itself takes."""
    unit = _unit(f"quantdrift-{name}.service")
    service = unit["Service"]
    assert CliRunner().invoke(main, [*service["ExecStart"].split()[1:], "--help"]).exit_code == 0
    assert (service["Restart"], unit["Unit"]["StartLimitIntervalSec"]) == ("always", "0")
    takes_s = {
        "up": Sidecar().grace_s + 2 * GRACE_S + SERVERS_GRACE_S,
        "sidecar": Sidecar().grace_s,
        "web": 5.0,
    }
    assert float(service["TimeoutStopSec"].removesuffix("s")) > takes_s.get(name, GRACE_S)


def test_systemd_leaves_the_relay_workers_of_a_killed_supervisor() -> None:
    """They serve until the next one has their port; and one process that the kernel ends takes no other with it."""
    for name in ROLES:
        service = _unit(f"quantdrift-{name}.service")["Service"]
        is_serving = name in {"sidecar", "up"}
        assert (service.get("KillMode"), service.get("OOMPolicy")) == (
            ("process", "continue") if is_serving else (None, None)
        )


def test_the_timer_and_the_cron_job_write_the_same_report_at_the_same_time() -> None:
    """Both run the same command, on Mondays at 6:00 UTC, and the command line knows every word of it."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/report/report.yaml").read_text(encoding="utf-8"))
    job = next(document for document in documents if document["kind"] == "CronJob")["spec"]
    (container,) = job["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    service, timer = _unit("quantdrift-report.service")["Service"], _unit("quantdrift-report.timer")["Timer"]
    command = service["ExecStart"].split()
    assert command[1:] == container["args"]
    assert (job["schedule"], job["timeZone"]) == ("0 6 * * 1", "Etc/UTC")
    assert timer["OnCalendar"] == "Mon *-*-* 06:00:00 UTC"
    assert service["WorkingDirectory"] == container["workingDir"]
    assert CliRunner().invoke(main, [*command[1:], "--help"]).exit_code == 0
