"""What `diagnose`, `repair` and `gate` can do for an alert: what is printed works, and what cannot work is not printed."""

import msgspec
import pytest

from quantdrift.core.config.schema import CandidateCopy, Config, Model, Reference, Runtime, Slice
from quantdrift.core.diagnosable import NextCommands, build_of, next_commands, task_problem
from quantdrift.core.records import Predicate
from quantdrift.core.tasks import Build, Task

pytestmark = pytest.mark.unit

ONNX = Reference(path="digits.onnx")
TORCH = Reference(runtime=Runtime.TORCH, path="digits.safetensors", factory="models:fp32")
SERVER = Reference(runtime=Runtime.OIP_HTTP, url="http://127.0.0.1:1")
LANGUAGE = Reference(runtime=Runtime.OPENAI, url="http://127.0.0.1:1")
FOLDER = Reference(runtime=Runtime.TRANSFORMERS, path="fp32")
BY_HEADER = (Predicate(key="header.x-scanner", equals="archive"),)
BY_FEATURE = (Predicate(key="feature.contrast", low=0.5),)
LEARNED = (Predicate(key="cluster", equals="7"),)
REST = (Predicate(key="header.x-scanner"),)
RULES = (Slice(name="scanner", header="x-scanner"), Slice(name="contrast", feature="contrast", edges=(0.5,)))


def _asked(
    *references: Reference,
    task: Task = Task.CLASSIFICATION,
    where: tuple[Predicate, ...] = BY_HEADER,
    build: Build | None = None,
    known: tuple[str, ...] = (),
    exemplars: bool = False,
) -> NextCommands:
    model = Model(name="digits", task=task, references=references, exemplars=exemplars)
    return next_commands(
        Config(models=(model,), slices=RULES),
        alert_id=12,
        model="digits",
        version="int8-1",
        slice_name="the slice",
        where=where,
        build=build,
        known=known,
        options=" --data=d",
    )


@pytest.mark.parametrize(
    ("reference", "programs"),
    [
        (FOLDER, ["diagnose", "gate"]),
        (Reference(runtime=Runtime.TRANSFORMERS, path="f16.gguf"), ["gate"]),
        (Reference(runtime=Runtime.TRANSFORMERS, path="fp32", copy=CandidateCopy(path="q4.gguf")), ["gate"]),
    ],
)
def test_a_gguf_file_is_not_diagnosed(reference: Reference, programs: list[str]) -> None:
    """Where the configuration does not tell that the candidate is one, the reader is told."""
    found = _asked(reference, task=Task.GENERATION)
    assert _programs(found) == programs
    if programs[0] == "diagnose":
        assert found.commands[0].gives.endswith("no GGUF file")


def _programs(found: NextCommands) -> list[str]:
    return [one.text.split()[1] for one in found.commands]


def test_all_three_are_printed_where_they_can_work() -> None:
    """Whole, with what the reader has given; of the file it is said what it must be."""
    found = _asked(ONNX)
    assert [(one.gives, one.text) for one in found.commands] == [
        (
            "Cause, if the candidate is an ONNX file",
            "quantdrift diagnose 12 --candidate FILE --inputs FOLDER --data=d",
        ),
        (
            "Build repairs",
            "quantdrift repair 12 --candidate FILE --inputs FOLDER --out REPAIRED --data=d",
        ),
        (
            "Is another file better",
            "quantdrift gate FILE --inputs FOLDER --model=digits --note=12 --data=d",
        ),
    ]
    assert not found.why_not
    assert _programs(_asked(ONNX, known=("cause", "repair"))) == ["gate"]


def test_a_language_model_is_judged_on_its_traffic() -> None:
    """It needs no recording."""
    (gate,) = _asked(LANGUAGE, task=Task.GENERATION).commands
    assert gate.text == "quantdrift gate FOLDER-OR-URL --live --model=digits --note=12 --data=d"


@pytest.mark.parametrize("where", [LEARNED, REST], ids=["learned", "rest"])
def test_exemplars_tell_what_recorded_inputs_do_not(where: tuple[Predicate, ...]) -> None:
    """Where they are kept, the commands work on them: without `--inputs`. The gate takes inputs of any slice."""
    found = _asked(ONNX, where=where, exemplars=True)
    assert [one.text for one in found.commands] == [
        "quantdrift diagnose 12 --candidate FILE --data=d",
        "quantdrift repair 12 --candidate FILE --out REPAIRED --data=d",
        "quantdrift gate FILE --inputs FOLDER --model=digits --note=12 --data=d",
    ]
    assert not found.why_not


def test_the_reference_of_the_version_is_named_where_there_are_several() -> None:
    """Without its number the command would refuse."""
    other = msgspec.structs.replace(ONNX, versions=("fp16-*",))
    assert all(" --reference=2 " in one.text for one in _asked(other, ONNX).commands)


@pytest.mark.parametrize(
    ("found", "programs", "why_not"),
    [
        (_asked(ONNX, where=BY_FEATURE), ["diagnose", "repair", "gate"], ""),
        (_asked(ONNX, where=LEARNED), ["gate"], "it is learned, or has the rest of the values"),
        (_asked(ONNX, where=REST), ["gate"], "it is learned, or has the rest of the values"),
        (_asked(ONNX, build=Build.TREES), ["diagnose", "repair", "gate"], ""),
        (_asked(TORCH), ["diagnose", "repair", "gate"], ""),
        (_asked(msgspec.structs.replace(TORCH, factory="")), ["diagnose", "gate"], ""),
        (_asked(SERVER), ["gate"], "is neither an ONNX file nor in PyTorch"),
        (_asked(LANGUAGE, task=Task.GENERATION), ["gate"], "is no folder of a language model"),
        (_asked(FOLDER, task=Task.GENERATION), ["diagnose", "gate"], ""),
        (_asked(msgspec.structs.replace(ONNX, versions=("fp16-*",))), [], "has no reference of `digits`"),
        (_asked(), [], "has no reference of `digits`"),
    ],
)
def test_what_cannot_work_is_not_printed(found: NextCommands, programs: list[str], why_not: str) -> None:
    """And it is said why in one clause."""
    assert _programs(found) == programs
    assert (why_not in found.why_not) if why_not else not found.why_not
    assert ". " not in found.why_not


def test_an_unknown_model_has_no_command() -> None:
    """The commands read the configuration, too."""
    found = next_commands(
        Config(), alert_id=1, model="digits", version="1", slice_name="all", where=(), options=""
    )
    assert (found.commands, found.why_not) == ((), "the configuration has no model `digits`")


@pytest.mark.parametrize("task", list(Task))
def test_all_tasks_but_generation_can_be_diagnosed(task: Task) -> None:
    """Several outputs are no obstacle: the comparator says which it reads. Without rows for items nothing can be chosen."""
    model = Model(name="digits", task=task)
    assert bool(task_problem(model)) is (task is Task.GENERATION)
    assert task_problem(msgspec.structs.replace(model, batched=False))


def test_what_a_model_is_made_of_follows_from_its_reference() -> None:
    """Only the shadow, which opens the file, can see decision trees."""

    def built(reference: Reference, task: Task = Task.CLASSIFICATION, *, trees: bool = False) -> Build:
        return build_of(Model(name="m", task=task, references=(reference,)), "1", trees=trees)

    assert built(ONNX) is built(TORCH) is Build.NETWORK
    assert built(ONNX, trees=True) is Build.TREES
    assert built(LANGUAGE, Task.GENERATION) is Build.LANGUAGE
    assert built(SERVER) is Build.OTHER
