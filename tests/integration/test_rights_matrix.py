"""Every credential of `quantdrift up` against every action: the page of rights says what is so, and the manual promises nothing else."""

import asyncio
import ipaddress
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil
import pytest

from quantdrift.core.stream.rights import NatsRole
from quantdrift.storage.schema.roles import MONITOR, OPERATOR, PAGE, READER, REPORT, SHADOW
from tests.support.rights_matrix import NOBODY, PAGE_FILE, Installation, Matrix, installed, page, tried

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT: Final = Path(__file__).resolve().parents[2]
MANUAL: Final = (ROOT / "docs/how-to/rights.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Run `quantdrift up` with logins."""
    with installed(tmp_path_factory.mktemp("rights")) as running:
        yield running


@pytest.fixture(scope="module")
def results(installation: Installation) -> dict[str, Matrix]:
    """Return what each credential may do."""
    return asyncio.run(tried(installation))


def cells(name: str) -> tuple[str, str]:
    """Return what the manual says that a role may do, and may not."""
    (line,) = [line for line in MANUAL.splitlines() if line.startswith(f"| `{name}` |")]
    parts = [part.strip() for part in line.strip("| ").split(" | ")]
    return parts[1], "" if parts[-1] == "|" or len(parts) < 3 else parts[-1]


# Each phrase of the manual, by role, with what was tried: an action, or a table and the verb.
Tried = tuple[str, ...]
PROMISED: Final[Mapping[str, tuple[Mapping[str, Tried], Mapping[str, Tried]]]] = {
    NatsRole.SIDECAR: (
        {
            "publish exchanges and tallies": ("publish an exchange", "publish a tally"),
            "read policy and pause": (
                "read the policy",
                "read the pause",
                "hear the policy",
                "hear the pause",
            ),
        },
        {
            "read or delete anything that was captured": (
                "read exchanges",
                "read exemplars",
                "fetch one message of the stream",
                "fetch one message of the stream directly",
                "hear exchanges as they are published",
                "hear copies of exchanges",
                "hear everything",
                "delete a message",
                "empty a stream",
                "delete a stream",
                "hear the answers to the shadow",
                "create a stream of its own",
            ),
            "change policy or pause": ("publish the policy", "pause and resume"),
        },
    ),
    NatsRole.SHADOW: (
        {
            "read and acknowledge exchanges and tallies": (
                "read exchanges",
                "acknowledge exchanges",
                "read tallies",
            ),
            "read copies of exchanges": ("hear copies of exchanges",),
            "store and read [exemplars](exemplars.md)": ("store an exemplar", "read exemplars"),
            "create and update their streams": ("create and update the stream of exchanges",),
        },
        {"change policy or pause": ("publish the policy", "pause and resume")},
    ),
    NatsRole.MONITOR: (
        {
            "see how much waits": ("see how much waits",),
            "read tallies while no shadow does": ("read tallies",),
            "publish the policy": ("publish the policy",),
        },
        {
            "read exchanges": (
                "read exchanges",
                "fetch one message of the stream",
                "hear copies of exchanges",
            ),
            "pause": ("pause and resume",),
        },
    ),
    NatsRole.OPERATOR: (
        {
            "see how much waits": ("see how much waits",),
            "pause and resume": ("pause and resume",),
        },
        {
            "read exchanges": (
                "read exchanges",
                "fetch one message of the stream",
                "hear copies of exchanges",
            ),
            "change the policy": ("publish the policy", "update the bucket of the policy"),
        },
    ),
    NatsRole.ADMIN: (
        {
            "create, update and delete streams and buckets": (
                "create and update the stream of exchanges",
                "update the bucket of the policy",
                "delete a stream",
            ),
            "find and erase single exchanges": ("fetch one message of the stream", "delete a message"),
            "exemplars": ("read exemplars",),
        },
        {},
    ),
    SHADOW: (
        {
            "store comparisons, tallies and quarantined exchanges": (
                "insert comparison",
                "insert tally",
                "insert quarantine",
            )
        },
        {
            "delete or change them": (
                *("delete comparison", "update comparison", "delete tally", "update tally"),
                *("delete quarantine", "update quarantine"),
            ),
            "read what was quarantined": ("select quarantine payload",),
            "alert": ("insert alert", "update alert", "insert transition", "insert outbox"),
        },
    ),
    MONITOR: (
        {
            "fold": ("update fold", "insert verdict"),
            "alert": ("insert alert", "insert transition", "insert outbox"),
            "search": ("insert discovery", "hold the lock of the search"),
            "apply retention": (
                *("delete batch", "delete tally", "delete quarantine", "hold the lock of maintenance"),
                *("call partition_drop", "call payloads_drop"),
            ),
            "lead": ("update leader",),
            "read everything but payloads, vectors too": ("select embedding vector", "select comparison"),
        },
        {
            "read payloads": ("select quarantine payload",),
            "change comparisons and tallies": ("update comparison", "insert comparison", "update tally"),
        },
    ),
    OPERATOR: (
        {
            "read everything but payloads and vectors": ("select comparison", "select audit", "select alert"),
            "decide about baselines and slices": (
                "insert baseline",
                "insert slice_change",
                "update discovery",
            ),
            "acknowledge alerts": ("acknowledge in its own name",),
        },
        {
            "change or delete comparisons, verdicts, alerts or earlier decisions": (
                *(
                    "update comparison",
                    "delete comparison",
                    "update verdict",
                    "insert verdict",
                    "delete verdict",
                ),
                *(
                    "update alert",
                    "delete alert",
                    "update baseline",
                    "delete baseline",
                    "update alert_action",
                ),
                *("delete alert_action", "update incident_change", "delete incident_change"),
                *("update slice_change", "delete slice_change", "delete discovery_change", "delete audit"),
            ),
            "record anything about a gate that somebody else began": (
                "turn the verdict of somebody else's gate",
            ),
            "read payloads": ("select quarantine payload", "select embedding vector"),
            "lead": ("lead: hold the lock of the monitor", "update leader"),
        },
    ),
    PAGE: (
        {
            "what an operator may": ("insert baseline", "acknowledge in its own name"),
            "in the name of whoever has logged in at the [page](live-page.md#acknowledge-alerts-on-the-page)": (
                "acknowledge in somebody else's name",
            ),
        },
        {
            "as an operator": (
                *("update comparison", "delete comparison", "update alert", "delete alert_action"),
                *("select quarantine payload", "select embedding vector", "update leader", "delete audit"),
            )
        },
    ),
    REPORT: (
        {
            "read the same": ("select comparison", "select alert"),
            "note that a report was written": ("insert report_run",),
        },
        {
            "change anything else": (
                *("update report_run", "delete report_run", "insert alert_action", "insert baseline"),
                *("update alert", "delete comparison", "select quarantine payload"),
            )
        },
    ),
    READER: (
        {"read the same": ("select comparison", "select alert", "select audit")},
        {
            "change anything": (
                *("insert report_run", "insert alert_action", "insert baseline", "update alert"),
                *("delete comparison", "create a table", "lead: hold the lock of the monitor"),
            )
        },
    ),
}


def allowed(results: Mapping[str, Matrix], role: str, action: str) -> bool:
    """Return whether a role was allowed to do something: `VERB TABLE [COLUMN]`, `call FUNCTION`, or an action of the page."""
    matrix = results["NATS"] if isinstance(role, NatsRole) else results["SQL"]
    if action in matrix:
        return bool(matrix[action].get(role))
    verb, name, *column = action.split()
    if verb == "call":
        (row,) = [row for called, row in matrix.items() if called.startswith(f"call `{name}(")]
        return bool(row[role])
    rights = results["Tables"][f"`{name}`"][role]
    match = re.search(rf"\b{verb}\b( \((not )?([^)]*)\))?", rights)
    if match is None or not column or not match[1]:
        return match is not None
    return (column[0] in match[3].split(", ")) != bool(match[2])


def test_the_page_of_rights_says_what_each_credential_can_do(results: dict[str, Matrix]) -> None:
    """Whoever gives or takes a right sees it in the page: `python -m tests.support.rights_matrix` writes it again."""
    assert page(results) == PAGE_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("role", PROMISED)
def test_the_manual_promises_what_is_so(results: dict[str, Matrix], role: str) -> None:
    """Each phrase of its tables was tried: what a role may do it can, what it may not do is refused, and no phrase is left over."""
    may, may_not = cells(role)
    for text, phrases, expected in ((may, PROMISED[role][0], True), (may_not, PROMISED[role][1], False)):
        rest = re.sub(r"\(`[^)]*\)|\(\[`[^)]*\)\)", "", text)  # commands
        for phrase, actions in sorted(phrases.items(), key=lambda item: -len(item[0])):
            assert phrase in rest, (phrase, text)
            rest = rest.replace(phrase, "", 1)
            for action in actions:
                assert allowed(results, role, action) is expected, (phrase, action)
        assert not re.sub(r"\b(and|or)\b", "", rest).strip(" ,;."), rest


def test_who_has_no_role_and_no_token_does_nothing(results: dict[str, Matrix]) -> None:
    """But to ask whether processes live, and to call functions that compute from what they are given."""
    assert set(results["Tables"]) == {name for name, row in results["Tables"].items() if not row[NOBODY]}
    assert {action for action, row in results["SQL"].items() if row[NOBODY]} == {
        action
        for action in results["SQL"]
        if re.match(
            r"call `(array_added|array_sum|block_rows|block_values|some_block_values|mean_interval|not_observed_in)\(",
            action,
        )
    }
    for section in ("NATS", "Intake"):
        assert not any(row[NOBODY] for row in results[section].values()), section
    assert {action for action, row in results["Page"].items() if row[NOBODY]} == {"ask whether it lives"}
    assert not any(
        row[NOBODY] for action, row in results["Ports"].items() if "pause" in action or "gate" in action
    )
    assert not any(any(row.values()) for action, row in results["Ports"].items() if "another name" in action)


def test_nothing_that_up_writes_is_for_other_users(installation: Installation) -> None:
    """Neither keys, nor captured traffic, nor logs, whatever the umask of the shell."""
    found = [
        str(path.relative_to(installation.data))
        for path in (installation.data, *installation.data.rglob("*"))
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert found == []


def test_up_listens_on_this_machine_alone(installation: Installation) -> None:
    """Every port of every process, those of the embedded servers too."""
    up = psutil.Process(installation.pid)
    addresses = {
        (process.name(), connection.laddr.ip)
        for process in (up, *up.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == 2 and not connection.raddr)
    }
    assert len(addresses) >= 3
    assert [address for address in addresses if not ipaddress.ip_address(address[1]).is_loopback] == []
