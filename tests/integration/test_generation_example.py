"""The example of a language model."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.config.load import load
from quantdrift.models.runtimes.registry import runtime_request
from tests.integration.test_generation import CHAT, GREEDY, LISTS, replayed
from tests.support.shadow.language_models import loaded
from tests.support.shadow.openai_exchanges import exchange
from tests.support.shadow.vllm_like import VllmLike

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "generation" / "config.toml"


@pytest.fixture
def config_path(language_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the configuration beside what `make` wrote."""
    shutil.copytree(language_folder, tmp_path / "reference")
    return Path(shutil.copy(EXAMPLE, tmp_path))


@pytest.mark.release
def test_the_example_is_sound_and_its_reference_opens(config_path: Path) -> None:
    """`quantdrift config check --references` says so."""
    ran = CliRunner().invoke(main, ["config", "check", "--references", "--config", str(config_path)])
    assert ran.exit_code == 0, ran.output
    assert "is sound" in ran.output
    assert "float32" in ran.output
    assert "does not exist" not in ran.output


def test_the_example_scores_what_was_served(config_path: Path, language_folder: Path) -> None:
    """With its own options."""
    config = load(config_path)
    (model,) = config.models
    opening = runtime_request(config, model, model.references[0])
    asked = {"model": "small", "messages": [{"role": "user", "content": "what drifts?"}], **GREEDY, **LISTS}
    _, answered = VllmLike(*loaded(language_folder)).answer(CHAT, asked)
    (found,) = replayed([exchange(CHAT, asked, answered)], opening)
    assert found.divergences.flip.tolist() == [0]
    assert found.divergences.divergence[0] == pytest.approx(0, abs=1e-5)
