"""`quantdrift gate` on recorded inputs, as typed, with real ONNX models."""

import hashlib
import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from quantdrift.release.gate.observations import digests_of
from tests.support.commands import invoked
from tests.support.shadow.onnx_models import WEIGHT, inputs_of, linear_model, logits_of, saved

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
[capture]
headers = ["x-scanner", "x-user"]
[[models]]
name = "digits"
{model}
[[models.references]]
path = "fp32.onnx"
{reference}
[[slices]]
name = "scanner"
header = "x-scanner"
values = ["office", "archive"]
{slices}
"""
FEATURE = '[[slices]]\nname = "contrast"\nfeature = "contrast"\nedges = [0.7]\n'
N = 800
Numbers = npt.NDArray[Any]


def _configure(directory: Path, *, model: str = "", reference: str = "", slices: str = "") -> None:
    (directory / "config.toml").write_text(
        CONFIG.format(model=model, reference=reference, slices=slices), encoding="utf-8"
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a folder with a configuration, a reference, candidates and a recording."""
    _configure(tmp_path)
    saved(linear_model(), tmp_path / "fp32.onnx")
    saved(linear_model(weight=WEIGHT + np.float32(1e-4)), tmp_path / "good.onnx")
    worse = WEIGHT.copy()
    worse[0] *= np.float32(1.6)
    saved(linear_model(weight=worse), tmp_path / "worse.onnx")
    _record(tmp_path / "rec.npz")
    return tmp_path


def _record(path: Path, *, n: int = N, seed: int = 0, **more: Numbers) -> Numbers:
    """Record inputs, every other one of the archive."""
    x = inputs_of(n, seed=seed)
    scanner = np.where(np.arange(n) % 2, "archive", "office")
    arrays: dict[str, Any] = {"x": x, "scanner": scanner, **more}
    np.savez(path, **arrays)
    return x


def _gate(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return invoked("gate", *arguments, directory=directory)


def _answers(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    made = json.loads(done.stdout)
    return {(answer["slice"], answer["question"]): answer for answer in made["slices"]}


def test_a_candidate_that_decides_like_its_reference_passes_with_exit_code_0(directory: Path) -> None:
    """The table has a row for each slice, with the limit and nothing missing."""
    _configure(directory, slices=FEATURE)
    _record(directory / "rec.npz", n=1000)
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz")
    assert done.returncode == 0, done.stderr
    rows = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    for name in ("all", "scanner=office", "scanner=archive"):
        assert re.search(r"changed answers +pass +[\d,]+ +0 % \[0 %, [\d.]+ %\] +< 1 %$", rows[name])
    assert "insufficient" not in done.stdout.replace("contrast", "")
    assert done.stdout.splitlines()[-1].startswith("pass: digits may be replaced by sha256:")


def test_a_candidate_that_breaks_a_slice_fails_with_exit_code_3(directory: Path) -> None:
    """It differs in a place where only the archive's inputs are not 0: the archive fails, though all inputs together do not."""
    x = inputs_of(N)
    x[::2, 0] = 0.0
    named: dict[str, Any] = {"header.x-scanner": np.where(np.arange(N) % 2, "archive", "office")}
    np.savez(directory / "rec.npz", x=x, **named)
    done = _gate(directory, "worse.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode == 3, done.stderr
    made, answers = json.loads(done.stdout), _answers(done)
    assert made["verdict"] == "fail"
    assert made["more"] == 0
    assert answers["scanner=archive", "flips"]["verdict"] == "fail"
    assert answers["scanner=archive", "flips"]["low"] > 0.01
    assert answers["scanner=office", "flips"]["verdict"] == "pass"
    assert answers["all", "flips"]["verdict"] == "insufficient"
    done = _gate(directory, "worse.onnx", "--inputs", "rec.npz")
    assert done.stdout.splitlines()[-1] == "fail: above the limit in scanner=archive"


def test_too_few_inputs_are_insufficient_with_exit_code_4_and_the_number_that_is_missing(
    directory: Path,
) -> None:
    """100 inputs without a flip: 50 of each scanner, each of which needs 370; as many more as said decide it."""
    _record(directory / "rec.npz", n=100)
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode == 4, done.stderr
    made = json.loads(done.stdout)
    assert (made["verdict"], made["more"]) == ("insufficient", 320)
    text = _gate(directory, "good.onnx", "--inputs", "rec.npz").stdout
    assert "about 270 more" in text
    assert "the slice that lacks most needs about 320 more" in text
    _record(directory / "rec.npz", n=100 + 2 * 320)
    assert _gate(directory, "good.onnx", "--inputs", "rec.npz").returncode == 0


def test_a_slice_without_any_input_holds_up_the_pass(directory: Path) -> None:
    """Nothing of the archive was recorded: it has no mean, and needs 370."""
    np.savez(directory / "rec.npz", x=inputs_of(N), scanner=np.full(N, "office"))
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode == 4
    answer = _answers(done)["scanner=archive", "flips"]
    assert (answer["n"], answer["mean"], answer["more"]) == (0, None, 370)


def test_integers_are_a_candidate_but_no_reference(directory: Path) -> None:
    """A quantised model is judged, by its own kernels; as a reference it is refused as before."""
    quantize_dynamic(str(directory / "fp32.onnx"), str(directory / "int8.onnx"), weight_type=QuantType.QUInt8)
    done = _gate(directory, "int8.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode in {0, 3, 4}, done.stderr
    flips = _answers(done)["all", "flips"]
    assert (flips["n"], 0 <= flips["mean"] < 0.1) == (N, True)
    (directory / "int8.onnx").rename(directory / "fp32.onnx")
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz")
    assert done.returncode == 2
    assert "is not full precision" in done.stderr


def test_no_harm_is_asked_against_what_serves_and_names_the_slice_that_got_worse(directory: Path) -> None:
    """The repaired model heals the archive and damages the office: the archive passes both questions, the office neither."""
    x = inputs_of(N)
    is_archive = np.arange(N) % 2 == 1
    x[is_archive, 1] = 0.0
    x[~is_archive, 0] = 0.0
    np.savez(directory / "rec.npz", x=x, scanner=np.where(is_archive, "archive", "office"))
    other = WEIGHT.copy()
    other[1] *= np.float32(1.6)
    saved(linear_model(weight=other), directory / "repaired.onnx")
    done = _gate(directory, "repaired.onnx", "--inputs", "rec.npz", "--against", "worse.onnx", "--json")
    assert done.returncode == 3, done.stderr
    answers = _answers(done)
    assert answers["scanner=archive", "flips"]["verdict"] == "pass"
    assert answers["scanner=archive", "harm"]["verdict"] == "pass"
    assert answers["scanner=archive", "harm"]["mean"] < 0
    assert answers["scanner=office", "harm"]["verdict"] == "fail"
    assert answers["scanner=office", "harm"]["limit"] == 0.005
    done = _gate(
        directory,
        "repaired.onnx",
        "--inputs",
        "rec.npz",
        "--against",
        "repaired.onnx",
        "--margin",
        "0.01",
        "--json",
    )
    harm = _answers(done)["scanner=office", "harm"]
    assert (harm["verdict"], harm["mean"], harm["limit"]) == ("pass", 0.0, 0.01)


def test_the_accuracy_is_asked_by_labels_or_bounded_by_flips(directory: Path) -> None:
    """With true classes 99 % pass and a broken candidate fails; without them flips must be few beside the given accuracy."""
    x = inputs_of(N)
    _record(directory / "rec.npz", truth=logits_of(x).argmax(axis=1))
    asked = ("--inputs", "rec.npz", "--json", "--mlperf", "99")
    done = _gate(directory, "good.onnx", *asked, "--labels", "truth")
    assert done.returncode == 0, done.stderr
    assert _answers(done)["all", "accuracy"]["mean"] == pytest.approx(-0.01)
    assert ("scanner=office", "accuracy") not in _answers(done)
    done = _gate(directory, "worse.onnx", *asked, "--labels", "truth")
    assert _answers(done)["all", "accuracy"]["verdict"] == "fail"
    done = _gate(directory, "good.onnx", *asked, "--reference-accuracy", "0.97")
    answer = _answers(done)["all", "accuracy"]
    assert (answer["verdict"], answer["limit"]) == ("pass", pytest.approx(0.0097))
    done = _gate(directory, "good.onnx", *asked[:-1], "99.9", "--reference-accuracy", "0.97")
    assert done.returncode == 4
    assert _answers(done)["all", "accuracy"]["more"] == 3793 - N


def test_classes_may_be_given_by_name(directory: Path) -> None:
    """As `models.labels` names them; an unknown one is an error."""
    _configure(directory, model='labels = ["zero", "one", "two"]')
    names = np.array(["zero", "one", "two"])[logits_of(inputs_of(N)).argmax(axis=1)]
    _record(directory / "rec.npz", truth=names)
    asked = ("--inputs", "rec.npz", "--mlperf", "99", "--labels", "truth")
    assert _gate(directory, "good.onnx", *asked).returncode == 0
    _record(directory / "rec.npz", truth=np.full(N, "ten"))
    done = _gate(directory, "good.onnx", *asked)
    assert (done.returncode, "the label `ten` is not in `models.labels`" in done.stderr) == (2, True)


def test_a_folder_gives_attributes_by_the_names_of_its_folders(directory: Path) -> None:
    """The same answers as from one file with an array."""
    x = inputs_of(N)
    for name, rows in (("office", x[0::2]), ("archive", x[1::2])):
        folder = directory / "rec" / f"scanner={name}"
        folder.mkdir(parents=True)
        np.savez(folder / "a.npz", x=rows[:150])
        np.savez(folder / "b.npz", x=rows[150:])
    from_folder = _answers(_gate(directory, "worse.onnx", "--inputs", "rec", "--json"))
    from_file = _answers(_gate(directory, "worse.onnx", "--inputs", "rec.npz", "--json"))
    assert from_folder == from_file
    (directory / "rec" / "scanner=office").rename(directory / "rec" / "office")
    done = _gate(directory, "good.onnx", "--inputs", "rec")
    assert (done.returncode, "name it NAME=VALUE, such as scanner=archive" in done.stderr) == (2, True)


@pytest.mark.parametrize("array", ["group", "x-user"])
def test_items_of_a_session_are_one_observation(directory: Path, array: str) -> None:
    """Four items each, by the array `group` or by the header that makes sessions: a quarter of the observations."""
    if array == "x-user":
        text = (directory / "config.toml").read_text(encoding="utf-8")
        sticky = '[sampling]\nsticky_header = "x-user"\n[[models]]'
        (directory / "config.toml").write_text(text.replace("[[models]]", sticky, 1), encoding="utf-8")
    sessions: dict[str, Any] = {array: np.arange(N) // 4}
    _record(directory / "rec.npz", **sessions)
    answers = _answers(_gate(directory, "worse.onnx", "--inputs", "rec.npz", "--json"))
    assert answers["all", "flips"]["n"] == N // 4
    _record(directory / "rec.npz")
    of_items = _answers(_gate(directory, "worse.onnx", "--inputs", "rec.npz", "--json"))
    assert of_items["all", "flips"]["n"] == N
    assert answers["all", "flips"]["mean"] == pytest.approx(of_items["all", "flips"]["mean"])


def test_a_model_that_takes_a_fixed_number_of_items_and_other_names_is_judged(directory: Path) -> None:
    """A candidate for batches of 48, and a reference whose input has another name in requests."""
    model = linear_model()
    model.graph.input[0].name = "pixels"
    model.graph.node[0].input[0] = "pixels"
    saved(model, directory / "fp32.onnx")
    saved(linear_model(batch=48), directory / "good.onnx")
    _configure(directory, reference='inputs = [{ name = "pixels", captured = "x" }]')
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode == 0, done.stderr
    assert _answers(done)["all", "flips"]["n"] == N


def test_a_model_without_a_dimension_of_items_is_run_item_by_item(directory: Path) -> None:
    """Each row of the recording is one exchange."""
    for name in ("fp32", "good"):
        saved(linear_model(batch=1), directory / f"{name}.onnx")
    _configure(directory, model="batched = false")
    x = _record(directory / "rec.npz")
    np.savez(
        directory / "rec.npz", x=x[:, np.newaxis], scanner=np.where(np.arange(N) % 2, "archive", "office")
    )
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode == 0, done.stderr
    assert _answers(done)["all", "flips"]["n"] == N


def test_values_that_nobody_declared_are_slices_and_the_rare_ones_share_one(directory: Path) -> None:
    """Of a rule without values the most frequent ones, as many as `max_values`, and `(other)`."""
    user = '[[slices]]\nname = "user"\nheader = "x-user"\nmax_values = 2\n'
    _configure(directory, slices=user)
    _record(directory / "rec.npz", user=np.repeat(["a", "b", "c", "d"], [400, 300, 60, 40]))
    names = {name for name, _ in _answers(_gate(directory, "good.onnx", "--inputs", "rec.npz", "--json"))}
    assert names == {"all", "scanner=office", "scanner=archive", "user=a", "user=b", "user=(other)"}


def test_junit_has_a_case_for_each_answer(directory: Path) -> None:
    """A failure is a failure, and what is insufficient an error, so that no CI takes it for a success."""
    _record(directory / "rec.npz", n=100)
    assert _gate(directory, "worse.onnx", "--inputs", "rec.npz", "--junit", "gate.xml").returncode in {3, 4}
    suite = ET.parse(directory / "gate.xml").getroot()
    kinds = [[child.tag for child in case] for case in suite.iter("testcase")]
    assert len(kinds) == int(suite.attrib["tests"]) == 3
    assert sum(kind == ["failure"] for kind in kinds) == int(suite.attrib["failures"])
    assert sum(kind == ["error"] for kind in kinds) == int(suite.attrib["errors"])
    assert int(suite.attrib["failures"]) + int(suite.attrib["errors"]) > 0
    names = {entry.attrib["name"]: entry.attrib["value"] for entry in suite.iter("property")}
    assert names["model"] == "digits"
    assert names["candidate"].startswith("sha256:")


def test_escape_sequences_of_a_recording_reach_no_terminal_and_no_report(directory: Path) -> None:
    """The values are as capture would record them, twins that look alike are one slice, and JUnit's XML is well formed."""
    user = '[[slices]]\nname = "user"\nheader = "x-user"\n'
    _configure(directory, slices=user)
    hostile = ["a\x1b[31m", "b\u202ec", "a[31m\u200b", "d]]><x/>"]
    _record(directory / "rec.npz", user=np.repeat(hostile, N // 4))
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--junit", "gate.xml")
    assert done.returncode in {0, 4}, done.stderr
    assert not {"\x1b", "\u202e", "\u200b"} & set(done.stdout + done.stderr)
    cases = {
        case.attrib["name"].partition(": ")[0] for case in ET.parse(directory / "gate.xml").iter("testcase")
    }
    assert cases >= {"user=a[31m", "user=bc", "user=d]]><x/>"}


@pytest.mark.parametrize("values", ['values = ["office", "archive"]', ""])
def test_a_route_serves_its_slice_with_a_file_of_its_own(directory: Path, values: str) -> None:
    """The archive is served by the good model and the rest by the worse one, in one file with both scanners mixed."""
    text = (directory / "config.toml").read_text(encoding="utf-8")
    (directory / "config.toml").write_text(
        text.replace('values = ["office", "archive"]', values), encoding="utf-8"
    )
    truth = logits_of(_record(directory / "rec.npz")).argmax(axis=1)
    _record(directory / "rec.npz", truth=truth)
    labelled = ("--inputs", "rec.npz", "--json", "--mlperf", "99", "--labels", "truth")
    whole = _answers(_gate(directory, "worse.onnx", *labelled))
    done = _gate(directory, "worse.onnx", *labelled, "--route", "scanner=archive=good.onnx")
    routed = _answers(done)
    assert routed["scanner=archive", "flips"]["mean"] == 0.0
    assert routed["scanner=office", "flips"] == whole["scanner=office", "flips"]
    assert routed["all", "flips"]["mean"] == pytest.approx(whole["scanner=office", "flips"]["mean"] / 2)
    assert routed["all", "accuracy"]["mean"] < whole["all", "accuracy"]["mean"]
    assert " scanner=archive=sha256:" in json.loads(done.stdout)["candidate"]


def _other_shape(directory: Path) -> None:
    np.savez(directory / "rec.npz", x=np.zeros((N, 5), np.float32), scanner=np.full(N, "office"))


def _other_type(directory: Path) -> None:
    np.savez(directory / "rec.npz", x=np.zeros((N, 4)), scanner=np.full(N, "office"))


def _other_name(directory: Path) -> None:
    np.savez(directory / "rec.npz", image=inputs_of(N), scanner=np.full(N, "office"))


def _other_length(directory: Path) -> None:
    np.savez(directory / "rec.npz", x=inputs_of(N), scanner=np.full(N - 1, "office"))


def _no_attribute(directory: Path) -> None:
    np.savez(directory / "rec.npz", x=inputs_of(N))
    _configure(directory, slices=FEATURE)


def _more_numbers(directory: Path) -> None:
    _record(directory / "rec.npz", y=np.zeros((N, 2)))


def _no_onnx(directory: Path) -> None:
    (directory / "good.onnx").write_bytes(b"no model")


def _other_output(directory: Path) -> None:
    model = linear_model()
    model.graph.output[0].name = "scores"
    model.graph.node[1].output[0] = "scores"
    saved(model, directory / "good.onnx")


def _other_input_name(directory: Path) -> None:
    model = linear_model()
    model.graph.input[0].name = "pixels"
    model.graph.node[0].input[0] = "pixels"
    saved(model, directory / "good.onnx")


def _other_output_shape(directory: Path) -> None:
    """Give all scores as one row."""
    model = linear_model()
    model.graph.initializer.append(onnx.helper.make_tensor("row", onnx.TensorProto.INT64, [1], [-1]))
    name, model.graph.node[-1].output[0] = model.graph.node[-1].output[0], "rows"
    model.graph.node.append(onnx.helper.make_node("Reshape", ["rows", "row"], [name]))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["k"]))
    saved(model, directory / "good.onnx")


def _no_arrays(directory: Path) -> None:
    np.savez(directory / "rec.npz")


def _no_bytes(directory: Path) -> None:
    (directory / "rec.npz").write_bytes(b"")


def _no_rows(directory: Path) -> None:
    np.savez(directory / "rec.npz", x=np.zeros((0, 4), np.float32), scanner=np.zeros(0, "U6"))


def _nothing(_: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (
            _other_shape,
            (),
            r"rec.npz: `x` is float32\[800, 5\], but the candidate good.onnx takes x: float32\[\?, 4\]",
        ),
        (
            _other_type,
            (),
            r"rec.npz: `x` is float64\[800, 4\], but the candidate good.onnx takes x: float32\[\?, 4\]",
        ),
        (_other_name, (), "rec.npz has no array `x`: it has `image`, `scanner`, and the inputs are `x`"),
        (_other_length, (), "`x` has 800 rows, but `scanner` has 799"),
        (_no_attribute, (), "no attribute for the slices `scanner`.*--slice contrast"),
        (
            _more_numbers,
            (),
            "the array `y`, float64.800, 2., is neither an input of the model nor an attribute",
        ),
        (_no_onnx, (), "the candidate good.onnx is not an ONNX model"),
        (_other_output, (), r"the candidate's outputs are \['scores'\]"),
        (
            _other_input_name,
            (),
            "the candidate good.onnx takes `pixels`, which the reference does not take: export it",
        ),
        (
            _other_output_shape,
            (),
            r"no output of the candidate good.onnx has one entry for each item, but it has logits: float32\[\?\]: export it",
        ),
        (_no_arrays, (), "rec.npz has no array `x`: it has none"),
        (_no_bytes, (), "rec.npz is no .npz file, or only the beginning of one: record it again"),
        (_no_rows, (), "rec.npz has no items"),
        (_nothing, ("--slice", "scanner=office"), "give the name of the rule, --slice scanner, "),
        (_nothing, ("--slice", "scaner"), "--slice scaner: .* it has `all`, `scanner`"),
        (_nothing, ("--mlperf", "99"), "--mlperf needs either --labels.*--reference-accuracy"),
        (_nothing, ("--labels", "truth"), "need --mlperf 99"),
        (_nothing, ("--margin", "0.01"), "--margin needs --against"),
        (_nothing, ("--mlperf", "99", "--labels", "truth"), "has no array `truth`, which --labels names"),
        (_nothing, ("--model", "letters"), "no model `letters`"),
        (
            _nothing,
            ("--route", "contrast<1=good.onnx"),
            "--route contrast<1: there is no such slice; known are `scanner=office`",
        ),
        (_nothing, ("--route", "scanner=archive"), "write SLICE=FILE"),
        (_nothing, ("--junit", "absent/gate.xml"), "--junit absent/gate.xml cannot be written"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_so(
    directory: Path, prepare: Callable[[Path], None], arguments: tuple[str, ...], words: str
) -> None:
    """Exit code 2, never that of a verdict, and a sentence that names the file and both sides."""
    prepare(directory)
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", *arguments)
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr
    assert not done.stdout


def test_one_broken_file_of_a_folder_is_named_before_anything_runs(directory: Path) -> None:
    """It is the last of the folder and cut off in its middle; no file is compared before."""
    folder = directory / "rec" / "scanner=archive"
    folder.mkdir(parents=True)
    np.savez(folder / "a.npz", x=inputs_of(N))
    whole = (folder / "a.npz").read_bytes()
    (folder / "b.npz").write_bytes(whole[: len(whole) // 2])
    done = _gate(directory, "good.onnx", "--inputs", "rec")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "quantdrift: rec/scanner=archive/b.npz is no .npz file, or only the beginning of one: record it again, or remove it\n"
    )


def test_a_junit_file_that_cannot_be_written_is_an_error_before_anything_runs(directory: Path) -> None:
    """The inputs were not even read; one that can be written is not left behind empty where there is another error."""
    (directory / "rec.npz").unlink()
    (directory / "rec").mkdir()
    done = _gate(directory, "good.onnx", "--inputs", "rec", "--junit", "absent/gate.xml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "quantdrift: --junit absent/gate.xml cannot be written: No such file or directory\n"
    done = _gate(directory, "good.onnx", "--inputs", "rec", "--junit", "gate.xml")
    assert (done.returncode, (directory / "gate.xml").exists()) == (2, False)


def test_a_typing_error_in_a_value_and_answers_that_are_not_finite_are_noted(directory: Path) -> None:
    """The verdict is insufficient as before, and stderr has the reason in one line; stdout stays JSON."""
    np.savez(directory / "rec.npz", x=inputs_of(N), scanner=np.full(N, "offfice"))
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (4, "insufficient")
    assert (
        "800 items are in no slice of `scanner`, because `values` of this rule does not have `offfice`\n"
        in done.stderr
    )
    np.savez(directory / "rec.npz", x=np.full((9, 4), np.nan, np.float32), scanner=np.full(9, "office"))
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--json")
    assert done.returncode == 4
    assert "9 items do not count, because the reference's answer to them is not finite\n" in done.stderr


def test_the_reference_itself_passes_as_a_candidate(directory: Path) -> None:
    """Nothing flips, and nothing is worse than itself."""
    done = _gate(
        directory, "fp32.onnx", "--inputs", "rec.npz", "--against", "fp32.onnx", "--margin", "0.02", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert {one["mean"] for one in _answers(done).values()} == {0.0}


def test_slices_without_an_attribute_are_left_out_only_if_one_says_so(directory: Path) -> None:
    """With --slice the named rules are judged, and all inputs together."""
    _no_attribute(directory)
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--slice", "contrast", "--json")
    assert {name for name, _ in _answers(done)} == {"all", "contrast<0.7", "contrast>=0.7"}
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--slice", "all", "--json")
    assert done.returncode == 0
    assert {name for name, _ in _answers(done)} == {"all"}


PERF = """Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency
1,69.2,225,2148,64,206,11781,19,0,13891,18795,19753,21018
3,84.2,237,1768,21673,209,11742,17,0,35398,43984,47085,51701
2,87.2,235,1973,9151,190,11346,17,0,21874,28557,29768,34766
"""
MLPERF = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 480.5
Result is : VALID
  Min duration satisfied : Yes

================================================
Additional Stats
================================================
50.00 percentile latency (ns)   : 2000000
99.00 percentile latency (ns)   : 9000000
"""


def test_a_candidate_is_measured_against_budgets_of_latency_and_throughput(directory: Path) -> None:
    """A wide budget passes, a narrow one fails the whole gate; device, clock and processor time are told, in JUnit too."""
    asked = ("good.onnx", "--inputs", "rec.npz", "--slice", "all")
    done = _gate(directory, *asked, "--latency-p99", "30", "--throughput", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    made, answers = json.loads(done.stdout), _answers(done)
    latency, throughput = answers["all", "latency"], answers["all", "throughput"]
    assert (latency["verdict"], throughput["verdict"]) == ("pass", "pass")
    assert 0 <= latency["low"] <= latency["mean"] <= latency["high"] < latency["limit"] == 30
    assert throughput["low"] <= throughput["mean"] <= throughput["high"]
    assert latency["n"] == made["load"]["n"] >= 370
    assert made["load"]["source"]
    assert 0 < made["load"]["p50_s"] <= made["load"]["p99_s"]
    assert made["load"]["cpu_p99_s"] >= 0
    done = _gate(directory, *asked, "--latency-p99", "1e-9", "--throughput", "1e9", "--junit", "gate.xml")
    assert done.returncode == 3, done.stderr
    assert re.search(r"all +latency p99 +fail .* < 1e-06 ms", done.stdout)
    assert re.search(r"all +throughput +fail .* >= 1e\+09 /s", done.stdout)
    assert done.stdout.endswith("fail: the load run does not keep its budget: latency p99, throughput\n")
    cases = {
        case.attrib["name"]: case for case in ET.parse(directory / "gate.xml").getroot().iter("testcase")
    }
    assert cases["all: latency p99"].find("failure") is not None
    assert cases["all: changed answers"].find("failure") is None


def test_the_file_of_a_route_is_measured_like_the_candidate(directory: Path) -> None:
    """Each keeps the budget or fails on its own, on the inputs of its slice; text, JSON and JUnit name its file."""
    asked = ("good.onnx", "--inputs", "rec.npz", "--slice", "scanner")
    routed = (*asked, "--route", "scanner=archive=worse.onnx")
    done = _gate(directory, *routed, "--latency-p99", "30", "--throughput", "0.01", "--json")
    made, answers = json.loads(done.stdout), _answers(done)
    assert {name for name, question in answers if question == "latency"} == {"all", "scanner=archive"}
    of_route = answers["scanner=archive", "latency"]
    assert (of_route["verdict"], answers["scanner=archive", "throughput"]["verdict"]) == ("pass", "pass")
    (load,) = made["routes"]
    assert (load["file"], load["slice"], load["n"]) == ("worse.onnx", "scanner=archive", of_route["n"])
    assert (made["load"]["file"], made["load"]["slice"]) == ("good.onnx", "all")
    assert load["n"] >= 370
    done = _gate(directory, *routed, "--latency-p99", "1e-9", "--junit", "gate.xml")
    assert done.returncode == 3, done.stderr
    assert re.search(r"load run of worse.onnx, [\d,]+ requests, ", done.stdout)
    assert done.stdout.endswith("latency p99 of good.onnx, latency p99 of worse.onnx\n")
    names = {case.attrib["name"] for case in ET.parse(directory / "gate.xml").getroot().iter("testcase")}
    assert {"all: latency p99 of good.onnx", "scanner=archive: latency p99 of worse.onnx"} <= names


def test_a_route_that_no_input_takes_has_no_speed_yet(directory: Path) -> None:
    """Nothing of the archive was recorded: its file is insufficient, with the number of requests that is missing, and no pass."""
    np.savez(directory / "rec.npz", x=inputs_of(N), scanner=np.full(N, "office"))
    asked = ("good.onnx", "--inputs", "rec.npz", "--slice", "scanner", "--latency-p99", "30")
    routed = (*asked, "--route", "scanner=archive=good.onnx")
    done = _gate(directory, *routed, "--json")
    assert done.returncode == 4, done.stderr
    latency = _answers(done)["scanner=archive", "latency"]
    assert (latency["verdict"], latency["n"], latency["mean"]) == ("insufficient", 0, None)
    assert latency["more"] == 370
    assert "no input is in its slice, so its speed was not measured" in _gate(directory, *routed).stdout


def test_each_file_has_a_load_run_of_its_own(directory: Path) -> None:
    """The slow route fails though the candidate is fast; without its load run, or with one of nobody, it is an error."""
    (directory / "fast.json").write_text('{"latency_p99_s": 0.001}', encoding="utf-8")
    (directory / "slow.json").write_text('{"latency_p99_s": 0.5}', encoding="utf-8")
    asked = ("good.onnx", "--inputs", "rec.npz", "--latency-p99", "0.02", "--load", "fast.json")
    routed = (*asked, "--route", "scanner=archive=worse.onnx")
    done = _gate(directory, *routed, "--load", "scanner=archive=slow.json", "--json")
    assert done.returncode == 3, done.stderr
    answers = _answers(done)
    assert (answers["all", "latency"]["verdict"], answers["all", "latency"]["mean"]) == ("pass", 0.001)
    slow = answers["scanner=archive", "latency"]
    assert (slow["verdict"], slow["mean"]) == ("fail", 0.5)
    for arguments, words in [
        (routed, "load run of worse.onnx is missing.*give --load scanner=archive=FILE"),
        ((*asked, "--load", "scanner=archive=slow.json"), "there is no --route scanner=archive=FILE"),
        ((*asked, "--load", "slow.json"), "good.onnx has two load runs"),
        ((*asked, "--load", "absent.json"), "--load absent.json: there is no file absent.json"),
        ((*routed, "--route", "scanner=archive=good.onnx"), "worse.onnx serves this slice already"),
    ]:
        done = _gate(directory, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.search(words, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("content", "p99", "rate"),
    [
        (PERF, 0.034766, 87.2),
        (MLPERF, 0.009, 480.5),
        ('{"latency_p99_s": 0.02, "throughput_per_s": 100, "requests": 900}', 0.02, 100),
    ],
)
def test_a_finished_load_run_is_read_from_its_file(
    directory: Path, content: str, p99: float, rate: float
) -> None:
    """Microseconds and nanoseconds become seconds; of several loads the fastest that keeps the latency counts."""
    (directory / "load").write_text(content, encoding="utf-8")
    asked = (
        "good.onnx",
        "--inputs",
        "rec.npz",
        "--slice",
        "all",
        "--json",
        "--load",
        "load",
        "--throughput",
        "80",
    )
    done = _gate(directory, *asked, "--latency-p99", "0.05")
    assert done.returncode == 0, done.stderr
    answers = _answers(done)
    assert answers["all", "latency"]["mean"] == pytest.approx(p99)
    assert answers["all", "throughput"]["mean"] == rate
    done = _gate(directory, *asked, "--latency-p99", "0.001")
    assert done.returncode == 3
    assert _answers(done)["all", "latency"]["verdict"] == "fail"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello", "is no CSV of perf_analyzer"),
        ('{"p99": 1}', "is no load run: .*p99"),
        ('{"throughput_per_s": 5}', "has no p99 of the latency"),
        ('{"latency_p99_s": -1}', "are numbers above 0"),
        (MLPERF.replace("VALID", "INVALID"), "says that its result is INVALID"),
        (MLPERF.replace("PerformanceOnly", "AccuracyOnly"), "is of the mode AccuracyOnly"),
        (PERF.splitlines()[0], "has a head and no row"),
        (PERF.replace("21018", "fast"), "`fast` is no number"),
    ],
)
def test_a_file_that_is_no_load_run_is_an_error(directory: Path, content: str, words: str) -> None:
    """Exit code 2 before anything runs, with the name of the file."""
    (directory / "load").write_text(content, encoding="utf-8")
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--latency-p99", "1", "--load", "load")
    assert done.returncode == 2
    assert re.search(f"--load load.*{words}", done.stderr), done.stderr


def test_the_mean_divergence_is_asked_of_every_slice_with_divergence(directory: Path) -> None:
    """It is compared with `models.budget.divergence`, each divergence counting at most the cap; a budget above the cap is an error."""
    _configure(directory, model="budget = { divergence = 0.02, cap = 1.0 }")
    asked = ("--inputs", "rec.npz", "--divergence", "--json")
    done = _gate(directory, "good.onnx", *asked)
    assert done.returncode == 0, done.stderr
    answers = _answers(done)
    assert {name for name, question in answers if question == "divergence"} == {name for name, _ in answers}
    good = answers["scanner=archive", "divergence"]
    assert (good["verdict"], good["limit"]) == ("pass", 0.02)
    assert 0 <= good["mean"] < 1e-4
    saved(linear_model(weight=-WEIGHT), directory / "broken.onnx")
    broken = _answers(_gate(directory, "broken.onnx", *asked))["all", "divergence"]
    assert broken["verdict"] == "fail"
    assert 0.02 < broken["low"] <= broken["mean"] <= broken["high"] <= 1.0
    _configure(directory, model="budget = { divergence = 1.0, cap = 1.0 }")
    done = _gate(directory, "good.onnx", *asked)
    assert (done.returncode, "budget.cap" in done.stderr) == (2, True)


def test_copies_and_calibration_inputs_are_no_evidence(directory: Path) -> None:
    """50 inputs, each 40 times, are 50; those of the calibration do not count. Both are said, and so is it in JSON."""
    x = np.repeat(inputs_of(50, seed=5), 40, axis=0)
    scanner = np.where(np.arange(len(x)) % 2, "archive", "office")
    np.savez(directory / "copies.npz", x=x, scanner=scanner)
    done = _gate(directory, "good.onnx", "--inputs", "copies.npz", "--json")
    assert done.returncode == 4, done.stderr
    assert (json.loads(done.stdout)["n_copies"], _answers(done)["all", "flips"]["n"]) == (1_950, 50)
    assert "1,950 of 2,000 items are copies of others: copies count once" in done.stderr
    with np.load(directory / "rec.npz") as recorded:
        np.savez(directory / "calibration.npz", x=recorded["x"][:300])
    done = _gate(directory, "good.onnx", "--inputs", "rec.npz", "--calibration", "calibration.npz", "--json")
    assert json.loads(done.stdout)["n_calibrated"] == 300
    assert _answers(done)["all", "flips"]["n"] <= N - 300
    assert "300 items do not count, because the candidate was calibrated on them" in done.stderr


def test_what_a_repair_was_calibrated_on_is_known_by_the_record_beside_it(directory: Path) -> None:
    """Of the digest of the file alone: another candidate in the folder has its own."""
    with np.load(directory / "rec.npz") as recorded:
        digests = digests_of({"x": recorded["x"][:100]})
    good = f"sha256:{hashlib.sha256((directory / 'good.onnx').read_bytes()).hexdigest()}"
    record = {"repairs": [{"digest": good, "calibration": digests}]}
    (directory / "repairs.json").write_text(json.dumps(record), encoding="utf-8")
    for file, n_calibrated in (("good.onnx", 100), ("worse.onnx", 0)):
        done = _gate(directory, file, "--inputs", "rec.npz", "--json")
        assert json.loads(done.stdout)["n_calibrated"] == n_calibrated


def test_where_a_route_alone_changes_answers_other_slices_are_asked_for_harm(directory: Path) -> None:
    """The archive gets the reference; the office stays above its budget, and nothing is asked of it."""
    done = _gate(
        directory,
        "worse.onnx",
        *("--inputs", "rec.npz", "--against", "worse.onnx", "--route", "scanner=archive=good.onnx", "--json"),
    )
    answers = _answers(done)
    assert answers["scanner=archive", "flips"]["verdict"] == "pass"
    assert (answers["scanner=office", "harm"]["verdict"], answers["scanner=office", "harm"]["high"]) == (
        "pass",
        0.0,
    )
    assert ("scanner=office", "flips") not in answers
    assert ("all", "flips") not in answers
    assert done.returncode == 0, done.stderr


class _Made:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._path), "w")


def _pickled(directory: Path) -> None:
    made = np.array([_Made(directory / "PWNED")] * N, dtype=object)
    np.savez(directory / "rec.npz", x=inputs_of(N), scanner=made)


def _leading_out(directory: Path) -> None:
    _record(directory / "rec.npz")
    with zipfile.ZipFile(directory / "rec.npz", "a") as archive:
        archive.writestr("../../PWNED.npy", b"")


def _lying_about_its_size(directory: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4), }\n"
    with zipfile.ZipFile(directory / "rec.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def _a_header_without_end(directory: Path) -> None:
    (directory / "rec.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def _more_numbers_than_bytes(directory: Path) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [1099511627776, 1099511627776], "data_offsets": [0, 16]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (directory / "rec.safetensors").write_bytes(content)


def _custom_operator(directory: Path) -> None:
    model = linear_model()
    model.graph.node[0].domain = "evil"
    saved(model, directory / "good.onnx")


def _impossible_shape(directory: Path) -> None:
    model = linear_model()
    model.graph.initializer[0].dims[:] = [1 << 40, 1 << 40]
    saved(model, directory / "good.onnx")


@pytest.mark.parametrize(
    "prepare",
    [
        _pickled,
        _leading_out,
        _lying_about_its_size,
        _a_header_without_end,
        _more_numbers_than_bytes,
        _custom_operator,
        _impossible_shape,
        _no_onnx,
    ],
)
def test_a_file_made_to_hurt_is_refused_and_nothing_of_it_runs(
    directory: Path, prepare: Callable[[Path], None]
) -> None:
    """A pickle is never opened, no name leads out of the folder, no size is believed, and no operator of a stranger is found."""
    prepare(directory)
    inputs = "rec.safetensors" if (directory / "rec.safetensors").exists() else "rec.npz"
    done = _gate(directory, "good.onnx", "--inputs", inputs)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert not list(directory.parent.rglob("*PWNED*"))
