"""The tool that writes migrations."""

from pathlib import Path

import pytest

from quantdrift.storage.admin.migrate import head
from quantdrift.storage.admin.revision import write_revision

pytestmark = pytest.mark.integration


@pytest.mark.release
def test_a_new_revision_states_the_rule_and_finds_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It follows the newest one, says what it must respect, and compiles; the schema needs no change now."""
    path = write_revision("add a column", directory=tmp_path)
    capsys.readouterr()  # Alembic tells where it writes
    text = path.read_text(encoding="utf-8")
    assert "compatibility rule" in text
    assert f'down_revision = "{head()}"' in text
    assert "op." not in text
    compile(text, str(path), "exec")
