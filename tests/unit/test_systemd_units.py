"""The systemd units of the weekly report."""

import configparser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from quantdrift.cli.main import main

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[2] / "deploy"


def _unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "systemd" / name).read_text(encoding="utf-8"))
    return parser


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
