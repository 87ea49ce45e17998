"""`quantdrift reference`, as typed, against a server that really answers."""

import copy
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from quantdrift.cli.main import main
from quantdrift.models.runtimes.registry import open_reference
from quantdrift.models.runtimes.text.same_tokens import CandidateServer, doubt_of, other_tokens
from quantdrift.models.runtimes.text.scoring_runtime import ScoringRuntime
from tests.support.commands import invoked
from tests.support.shadow.language_models import loaded, opening, quantised
from tests.support.shadow.onnx_models import WEIGHT, inputs_of, linear_model, saved
from tests.support.shadow.vllm_like import VllmLike, serving
from tests.support.sidecar.relay_process import free_port

pytestmark = pytest.mark.integration

TEXT = """
[shadow]
provider = "cpu"
[[models]]
name = "small"
task = "generation"
[[models.references]]
runtime = "transformers"
path = "{folder}"
[[models.references]]
runtime = "openai"
url = "{url}"
canaries = "canaries.safetensors"
"""
CONFIG = """
[shadow]
provider = "cpu"
[[models]]
name = "digits"
[[models.references]]
path = "linear.onnx"
[[models.references]]
runtime = "oip-http"
url = "http://127.0.0.1:{port}"
canaries = "canaries.safetensors"
"""


def _quantdrift(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoked("reference", *arguments, directory=directory)


@contextmanager
def served(path: Path, port: int = 0) -> Iterator[int]:
    """Serve an ONNX file as the model `digits` by the server of the demo; yield its port."""
    command = [sys.executable, "-m", "quantdrift.demo.oip_server", "--model", f"digits={path}"]
    with subprocess.Popen(
        [*command, "--listen", f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline().rpartition(" ")[2])
        finally:
            server.terminate()


def test_a_server_must_give_the_answers_of_the_file(tmp_path: Path) -> None:
    """Recorded from the file: the server that holds it reproduces them, one with another model does not."""
    good = saved(linear_model(), tmp_path / "linear.onnx")
    other = saved(linear_model(weight=WEIGHT * np.float32(1.001)), tmp_path / "other.onnx")
    with served(good) as port:
        (tmp_path / "config.toml").write_text(CONFIG.format(port=port))
        done = _quantdrift(tmp_path, "record", "digits", "--reference", "1", "--out", "canaries.safetensors")
        assert done.returncode == 0, done.stderr
        assert "x float32[8, 4] -> logits float32[8, 3]" in done.stdout
        done = _quantdrift(tmp_path, "check")
        assert (done.returncode, "reproduced" in done.stdout) == (0, True), done.stderr
        assert "no canaries" in done.stdout
    with served(other, port):
        done = _quantdrift(tmp_path, "check", "digits", "--reference", "2", "--json")
        assert done.returncode == 2, done.stderr
        (told,) = json.loads(done.stdout)["references"]
        assert told["outcome"] == "failed"
        assert 1e-4 < told["deviations"]["logits"] < 2e-3
    done = _quantdrift(tmp_path, "check", "--json")
    assert done.returncode == 1
    assert [one["outcome"] for one in json.loads(done.stdout)["references"]] == ["no canaries", "away"]


def test_a_language_model_must_give_the_answers_of_the_folder(language_folder: Path, tmp_path: Path) -> None:
    """Random words, and a chat of one's own; another model at the server is named with the token that is off."""
    model, tokenizer = loaded(language_folder)
    server = VllmLike(model, tokenizer)
    (tmp_path / "own.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "what drifts?"}], "answer": "the mean"}\n'
    )

    def ran(*arguments: str) -> Result:
        command = ["reference", *arguments, "--config", str(tmp_path / "config.toml")]
        return CliRunner().invoke(main, command)

    with serving(server) as url:
        (tmp_path / "config.toml").write_text(TEXT.format(folder=language_folder, url=url))
        out = str(tmp_path / "canaries.safetensors")
        done = ran("record", "small", "--reference", "1", "--items", "3", "--out", out)
        assert done.exit_code == 0, done.output
        assert re.search(r"answer_ids int64\[3, \d+\] -> logprobs float64\[3, \d+\]", done.output)
        done = ran("check")
        assert (done.exit_code, "reproduced" in done.output) == (0, True), done.output
        own = ("--inputs", str(tmp_path / "own.jsonl"))
        done = ran("record", "small", "--reference", "1", *own, "--out", out, "--json")
        assert json.loads(done.output)["outputs"]["logprobs"].startswith("float64[1, ")
        server.model = quantised(model)
        done = ran("check", "small", "--reference", "2")
        assert done.exit_code == 2, done.output
        assert re.search(r"failed +0\.\d+, allowed is 0\.0001: at \[0, \d+\] it gives -\d+", done.output)
        done = ran("check", "--json")
        (_, told) = json.loads(done.output)["references"]
        assert (told["outcome"], "recorded is -" in told["detail"]) == ("failed", True)
    done = ran("check")
    assert (done.exit_code, "away" in done.output) == (1, True)


def test_inputs_of_ones_own_are_recorded(tmp_path: Path) -> None:
    """From npz; those that the reference does not take are refused with both sides."""
    saved(linear_model(), tmp_path / "linear.onnx")
    (tmp_path / "config.toml").write_text(
        '[[models]]\nname = "m"\n[[models.references]]\npath = "linear.onnx"\n'
    )
    record = ("record", "m", "--out", "c.safetensors", "--inputs", "own.npz")
    np.savez(tmp_path / "own.npz", x=inputs_of(3))
    done = _quantdrift(tmp_path, *record, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == {"x": "float32[3, 4]"}
    np.savez(tmp_path / "own.npz", x=inputs_of(3).astype(np.float64))
    done = _quantdrift(tmp_path, *record)
    assert done.returncode == 2
    assert "the reference takes x: float32[?, 4], but got x: float64[3, 4]" in done.stderr
    for wrong, hint in (("record", "no model `n`"), ("check", "no model `n`")):
        done = _quantdrift(tmp_path, wrong, "n", *(("--out", "c") if wrong == "record" else ()))
        assert (done.returncode, hint in done.stderr) == (2, True)


TOKENS = """
[sidecar]
backend = "{backend}"
[capture]
protocols = ["openai-chat"]
[shadow]
provider = "cpu"
[[models]]
name = "small"
task = "generation"
[[models.references]]
runtime = "transformers"
path = "{folder}"
"""


def test_another_tokenizer_or_template_is_found_before_anything_is_compared(
    language_folder: Path, tmp_path: Path
) -> None:
    """By `/tokenize` of the server behind the sidecar; one that has no such path is not asked further."""
    model, tokenizer = loaded(language_folder)
    runtime = open_reference(opening(language_folder))
    assert isinstance(runtime, ScoringRuntime)

    def other(served: Any, *, echo: bool = False) -> str:
        with serving(VllmLike(model, served, takes_prompt_logprobs=not echo)) as url:
            return other_tokens(runtime.language, CandidateServer(url.removeprefix("http://"), "small"))

    assert not other(tokenizer)
    template = copy.deepcopy(tokenizer)
    template.chat_template = "{{ 'And so: ' }}" + template.chat_template
    assert "tokens of a chat of one message" in other(template)
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["quick"])
    assert not other(more, echo=True)
    runtime.close()
    with serving(VllmLike(model, more)) as url:
        text = TOKENS.format(folder=language_folder, backend=url.removeprefix("http://"))
        (tmp_path / "config.toml").write_text(text)
        command = ["config", "check", "--references", "--config", str(tmp_path / "config.toml")]
        done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "tokens of 'The quick brown fox jumps over the lazy dog.'" in done.output
    assert "their tokenizers differ. Serve the reference with the tokenizer" in done.output


@contextmanager
def _llama_cpp(file: Path) -> Iterator[str]:
    """Serve a GGUF file by llama.cpp's own server; yield HOST:PORT once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "quantdrift.demo.text.server", "--file", str(file), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while not CandidateServer(f"127.0.0.1:{port}", "small").tokens({"content": "a"}):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_the_chat_template_of_llama_cpp_is_compared(language_folder: Path, tmp_path: Path) -> None:
    """Its server renders a chat: the same template has no doubt, and another one is named with what to do."""
    from quantdrift.demo.text.model import write_gguf

    model, tokenizer = loaded(language_folder)
    runtime = open_reference(opening(language_folder))
    assert isinstance(runtime, ScoringRuntime)
    weights = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    doubts = []
    for begin in ("", "{{ 'And so: ' }}"):
        served = copy.deepcopy(tokenizer)
        served.chat_template = begin + tokenizer.chat_template
        write_gguf(tmp_path / "served.gguf", weights, model.config, served, bits=32)
        with _llama_cpp(tmp_path / "served.gguf") as address:
            doubts.append(doubt_of(runtime.language, address, "small"))
    runtime.close()
    assert doubts[0] == ""
    assert (
        "their chat templates differ. Serve the reference with the tokenizer and the chat template"
        in doubts[1]
    )
    assert doubt_of(runtime.language, "127.0.0.1:1", "small") == ""  # nobody is there
