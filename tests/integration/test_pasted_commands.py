"""Commands that people paste from an alert or an incident, in a real shell."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from quantdrift.facts.words.alert import text_of
from quantdrift.facts.words.incident import labels_wanted
from tests.support.monitor.alert_cases import event_with
from tests.support.monitor.alert_texts import WAYS, incident

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "hostile", ["$(touch PWNED)", "`touch PWNED`", "a'; touch PWNED; '", 'a" && touch PWNED #', "-o"]
)
def test_a_command_with_a_name_of_a_client_runs_nothing_else_in_a_shell(hostile: str, tmp_path: Path) -> None:
    """Versions and values of slices come from the wire: each is one word, as it was sent."""
    version, previous, name = f"v{hostile}", f"w{hostile}", f"user={hostile}"
    ways = msgspec.structs.replace(WAYS, previous=previous)
    events = (event_with(version=version, slice=name, begin=begin) for begin in ("changed", "new_version"))
    texts = [text_of(event, ways) for event in events]
    commands = [step.command for text in texts for step in (*text.do_now, *text.tomorrow) if step.command]
    commands.append(labels_wanted(incident(version=version)))
    script = "quantdrift() { printf '%s\\n' \"$@\"; }\n" + "\n".join(commands)
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not list(tmp_path.iterdir())
    assert {version, previous, name} <= set(done.stdout.splitlines())
