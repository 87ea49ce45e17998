"""The table of states, and that nothing else has words or an order of its own for them."""

import re

import pytest

from quantdrift.core.records import Verdict
from quantdrift.facts.status import ALERTS, LEVEL, RANK, STATUSES, WORST_FIRST, alert_kind, said, worst
from tests.support.isolation import ROOT

pytestmark = pytest.mark.unit


def test_every_verdict_has_one_place_and_words_of_its_own() -> None:
    """The worst first; the numbers of gauges are those that rules and boards ask for."""
    assert {status.verdict for status in STATUSES} == set(Verdict)
    assert [said(verdict) for verdict in RANK] == ["drifted", "possible drift", "not known", "OK"]
    assert dict(LEVEL) == {"ok": 0, "unknown": 1, "warning": 2, "firing": 3}
    assert {severity: alert_kind(severity) for severity in ALERTS} == {"firing": "page", "warning": "ticket"}
    page = (ROOT / "docs/explanation/verdicts.md").read_text(encoding="utf-8")
    assert all(f"| `{status.verdict.value}` | {status.words} |" in page for status in STATUSES)
    assert WORST_FIRST == "array['firing', 'warning', 'unknown', 'ok']"


def test_the_worst_of_some_is_never_better_than_one_of_them() -> None:
    """And nothing at all is not known."""
    assert worst([]) is Verdict.UNKNOWN
    assert worst(["ok", "unknown"]) is Verdict.UNKNOWN
    assert worst([Verdict.WARNING, Verdict.FIRING, Verdict.UNKNOWN]) is Verdict.FIRING


@pytest.mark.slow
def test_no_other_file_has_an_order_or_words_of_the_states() -> None:
    """Neither a list of all four in code, SQL or a template, nor a word that stood for one of them before."""
    names = "|".join(verdict.value for verdict in Verdict)
    order = re.compile(
        rf"""(?:['"](?:{names})['"](?::\s*[\w"'. -]+)?,?\s*){{4}}|(?:Verdict\.[A-Z]+(?::\s*\w+)?,\s*){{3}}Verdict\."""
    )
    words = re.compile(r"\bin doubt\b(?=['\"<])|perhaps not OK|['\">]not OK\b|is well again")
    own = {
        ROOT / "quantdrift/facts/status.py",
        ROOT / "quantdrift/core/records.py",
        ROOT / "storage/schema/monitor_tables.py",
    }
    files = {
        path.resolve()
        for folder in ("quantdrift", "storage", "examples")
        for suffix in ("py", "html", "js")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    }
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in sorted(files - own)
        if (match := order.search(text := path.read_text(encoding="utf-8")) or words.search(text))
    }
    assert found == {}
