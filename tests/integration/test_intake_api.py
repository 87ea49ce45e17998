"""The intake against its own OpenAPI file, and the how-to pages about ways in, typed as they stand."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.support.sidecar.raw_exchanges import REQUEST, RESPONSE
from tests.support.sidecar.relay_process import SidecarProcess, free_port, sidecar, wait

pytestmark = pytest.mark.integration

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
TOKEN = "a-token-of-sixteen"
OPENAPI = json.loads((files("quantdrift.sidecar.intake") / "openapi.json").read_text(encoding="utf-8"))


class Intake:
    """A sidecar with every way in but the relay, which takes everything."""

    def __init__(self, running: SidecarProcess, port: int, logger_port: int, tap: Path) -> None:
        self.running = running
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            **os.environ,
            "INTAKE": self.url,
            "LOGGER": f"http://127.0.0.1:{logger_port}",
            "TOKEN": TOKEN,
            "QUANTDRIFT_TAP": str(tap),
        }

    def tell(self, body: bytes, **headers: str) -> tuple[int, Any]:
        """Send a batch; return status and answer."""
        told = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{self.url}/v1/exchanges", data=body, headers=told)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def n_offered(self) -> float:
        """Return how many exchanges have come in."""
        return self.running.count("quantdrift_sidecar_offered_total")

    def run(self, command: list[str], directory: Path | None = None) -> str:
        """Run a program that knows the intake by its environment; return what it printed."""
        done = subprocess.run(
            command,
            cwd=directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Intake]:
    """Return a running intake, with a bound that a test can pass."""
    port, logger_port = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="qd-") as directory:
        tap = Path(directory) / "tap"
        with sidecar(
            tmp_path_factory.mktemp("intake"),
            0,
            SIDECAR__LISTEN="",
            SIDECAR__BACKEND="127.0.0.1:1",
            SIDECAR__MAX_EXCHANGE_BYTES=1 << 20,
            INTAKE__LISTEN=f"127.0.0.1:{port}",
            INTAKE__KSERVE_LOGGER=f"127.0.0.1:{logger_port}",
            INTAKE__TAP=str(tap),
            SAMPLING__RATE=1.0,
            MODELS='[{"name": "digits"}]',
        ) as running:
            yield Intake(running, port, logger_port, tap)


@pytest.fixture(scope="module", autouse=True)
def _token() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTDRIFT_INTAKE_TOKEN", TOKEN)
        yield


@pytest.mark.release
def test_the_server_answers_as_its_description_says(intake: Intake, tmp_path: Path) -> None:
    """Schemathesis makes requests of the description and breaks them: no status, type or body is undescribed.

    A batch with a broken exchange in it is answered 200 by design: the next test looks at that.
    """
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{intake.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {TOKEN}", "--checks", "all"]
    command += ["--exclude-checks", "negative_data_rejection", "--max-examples", "10", "--seed", "1"]
    printed = intake.run([*command, "--no-color"], tmp_path)
    assert "No issues found" in printed


def test_an_exchange_is_rejected_exactly_where_the_description_says_so(intake: Intake) -> None:
    """Every member of every wrong type, beyond its bounds, missing, twice or unknown; each in one batch."""
    import jsonschema  # 3 s of processor time

    schema = {"$ref": "#/components/schemas/Exchange", "components": OPENAPI["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    sound: dict[str, Any] = {"target": "/v2/models/digits/infer", "request": REQUEST, "response": RESPONSE}
    exchanges = [
        sound,
        {**sound, "status": 503, "headers": {"x-scanner": "faint"}, "response_headers": {"x": "y"}},
        {name: value for name, value in sound.items() if name != "request"} | {"request_base64": "e30="},
        {name: value for name, value in sound.items() if name != "response"} | {"response_base64": ""},
        {**sound, "request": None},
        {**sound, "request_base64": "e30="},
        {**sound, "more": 1},
        {**sound, "target": "no path"},
        {**sound, "target": "/" + "a" * 4095},
        {**sound, "target": "/" + "a" * 4096},
        *({name: value for name, value in sound.items() if name != left_out} for left_out in sound),
        *({**sound, "status": status} for status in (99, 100, 599, 600, 200.5, 1e400, -1)),
        *(
            {**sound, name: {"x-scanner": value}}
            for name in ("headers", "response_headers")
            for value in (1, None)
        ),
    ]
    members = OPENAPI["components"]["schemas"]["Exchange"]["properties"]
    for name in members:
        exchanges += [{**sound, name: value} for value in (None, True, 7, 0.5, "\n", [], [1], {}, {"a": "b"})]
    assert len(exchanges) < 1000
    text = json.dumps({"exchanges": exchanges})
    exchanges = json.loads(text.replace("Infinity", "1e400"))["exchanges"]
    wrong = [index for index, one in enumerate(exchanges) if not validator.is_valid(one)]
    assert 50 < len(wrong) < len(exchanges) - 10
    status, receipt = intake.tell(text.replace("Infinity", "1e400").encode())
    assert status == 200
    rejected = {one["index"]: one["error"] for one in receipt["rejected"]}
    # What the description says in words alone: a content is base64, a time is one.
    in_words = {
        index
        for index, error in rejected.items()
        if error.endswith("_base64 is not base64") or "RFC3339" in error or "captured_at is more" in error
    }
    assert sorted(rejected.keys() - in_words) == sorted(set(wrong) - in_words)
    assert receipt["accepted"] == len(exchanges) - len(rejected)


@pytest.mark.parametrize(
    ("expected", "body", "headers"),
    [
        (200, b'{"exchanges": []}', {}),
        (400, b'{"exchanges": 1}', {}),
        (400, json.dumps({"exchanges": [1] * 1001}).encode(), {}),
        (401, b'{"exchanges": []}', {"Authorization": "Bearer other"}),
        (413, b" " * ((1 << 20) + 1), {}),
        (415, b'{"exchanges": []}', {"Content-Type": "text/plain"}),
        (415, b'{"exchanges": []}', {"Content-Encoding": "br"}),
    ],
)
def test_every_status_is_described_and_has_its_body(
    intake: Intake, expected: int, body: bytes, headers: dict[str, str]
) -> None:
    """And each that is described can be had, 503 where memory is short."""
    import jsonschema

    status, answer = intake.tell(body, **headers)
    assert status == expected
    described = OPENAPI["paths"]["/v1/exchanges"]["post"]["responses"]
    schema = described[str(status)]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": OPENAPI["components"]}).validate(answer)
    assert described.keys() == {"200", "400", "401", "413", "415", "503"}, "503: see test_intake_memory"


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page in one language."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("page", "n_exchanges"), [("intake.md", 1), ("kserve-logger.md", 1)])
def test_the_curl_of_a_page_can_be_typed(intake: Intake, page: str, n_exchanges: int) -> None:
    """It prints what the page says, and what it tells of is counted."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    before = intake.n_offered()
    (command,) = blocks(page, "bash")
    printed = intake.run(["bash", "-euc", command])
    assert [json.loads(shown) for shown in blocks(page, "json")] == ([json.loads(printed)] if printed else [])
    wait(lambda: intake.n_offered() == before + n_exchanges, "all are counted")


def test_the_python_of_the_intakes_page_can_be_run(intake: Intake) -> None:
    """As a program of its own, which knows nothing of quantdrift."""
    before = intake.n_offered()
    (program,) = blocks("intake.md", "python")
    assert "quantdrift" not in program
    assert intake.run([sys.executable, "-I", "-c", program]) == "{'accepted': 2, 'rejected': []}\n"
    wait(lambda: intake.n_offered() == before + 2, "both are counted")


def test_the_server_of_the_taps_page_can_be_run(intake: Intake) -> None:
    """What it told is sent as it ends, although nobody closed the tap."""
    before = intake.n_offered()
    (program,) = blocks("tap.md", "python")
    calls = "import time\nuntil = time.monotonic() + 30\nwhile not tap.is_ready and time.monotonic() < until: time.sleep(0.01)\n"
    calls += "for _ in range(3): predict(np.ones((1, 2), dtype=np.float32), 'faint')\n"
    intake.run([sys.executable, "-c", program + calls])
    wait(lambda: intake.n_offered() == before + 3, "all are counted")


@pytest.mark.release
def test_the_page_about_reloading_names_what_holds_at_once() -> None:
    """Section by section, as the sidecar does it."""
    from quantdrift.sidecar.state.config import _LIVE, _SECTIONS

    rows: dict[str, str] = {}
    for line in (PAGES / "reload.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `["):
            _, sections, live, _, _ = line.split("|")
            rows |= dict.fromkeys(re.findall(r"`\[*(\w+)\]*`", sections), live)
    assert rows.keys() == {*_LIVE, *_SECTIONS}
    for section, options in _LIVE.items():
        assert re.findall(r"`(\w+)`", rows[section]) == list(options)
    for section in _SECTIONS:
        assert rows[section].strip().startswith("all")
