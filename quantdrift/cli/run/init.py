"""The command `quantdrift init`."""

import asyncio
import difflib
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from quantdrift.cli.config_summary import memory_bytes
from quantdrift.cli.options import JSON, emit
from quantdrift.cli.output import ProgressLine
from quantdrift.core.config.address import AddressError, read_address
from quantdrift.core.config.load import config_of, load
from quantdrift.core.config.models import PROGRAM
from quantdrift.core.config.parts import Parts, read_parts
from quantdrift.core.config.schema import Config, Reference, Runtime
from quantdrift.core.config.wrong_values import similar_file
from quantdrift.core.errors import OperatorError, QuantdriftError
from quantdrift.core.records import GENERATED
from quantdrift.core.tasks import Task
from quantdrift.core.text import plain
from quantdrift.init.deployment import COMPOSE, VALUES, compose_file, helm_values
from quantdrift.init.files import ModelFile, read_model_file
from quantdrift.init.proposal import Choice, Proposal, choose, name_of, people_note, slice_names, use_traffic
from quantdrift.init.references import OpenedReference, program_reference, served_reference
from quantdrift.init.server import Server, accepts, ask_server
from quantdrift.init.toml import differences, text_of
from quantdrift.init.traffic import Kept, Source, Traffic, watch

_LISTEN: Final = "0.0.0.0:8000"
_BACKEND: Final = "127.0.0.1:8001"
_WATCH: Final = "Watch traffic there for a minute now?"
_MOST_REPLAYED: Final = 64
_MOST_SHOWN: Final = 4
_MOST_PLANNED: Final = 6
_SOURCES: Final = {Source.HEADER: "header", Source.PARAMETER: "parameter", Source.JSON: "value of the JSON"}


class Initialised(msgspec.Struct, frozen=True, kw_only=True):
    """What the command prints as JSON.

    Parameters
    ----------
    file, written
        The configuration file, and whether this call wrote it.
    config
        The proposed text.
    differences
        From the file that was there, an option a line.
    notes
        What was found.
    checked
        Precision and digest of each reference that was opened, by path.
    replays
        In a sentence, what the first replays showed; empty: there were none.
    plan
        The table of `quantdrift plan` for the traffic that came; empty: none came, or no reference was opened.
    deployment
        The files that run it elsewhere.
    """

    file: str
    written: bool
    config: str
    differences: list[str] = []
    notes: list[str] = []
    checked: dict[str, str] = {}
    replays: str = ""
    plan: str = ""
    deployment: list["WrittenFile"] = []


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file for Compose or Kubernetes.

    Parameters
    ----------
    written
        Whether this call wrote it.
    differences
        From the file that was there, as `diff` shows them; empty: it is the same, or it was written.
    notes
        What to do before it is used.
    """

    file: str
    written: bool
    differences: list[str]
    notes: tuple[str, ...]


@click.command()
@click.argument("reference", required=False, metavar="[REFERENCE]")
@click.option(
    "--candidate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The quantised ONNX file that serves: what can be diagnosed follows from its form.",
)
@click.option(
    "--model", "name", default="", help="The model's name in requests.  [default: what server or traffic say]"
)
@click.option("--backend", default="", help=f"The inference server, HOST:PORT.  [default: {_BACKEND}]")
@click.option(
    "--tap",
    default="",
    metavar="SOCKET",
    help="The Python server reports its exchanges itself, through this Unix socket: nothing is relayed.",
)
@click.option("--listen", default="", help=f"Where clients are to connect, HOST:PORT.  [default: {_LISTEN}]")
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(min=0, max=3600),
    help="Relay requests from --listen to --backend for so many seconds, unchanged, and learn from them.  [default: 0]",
)
@click.option(
    "--requests",
    "most_requests",
    type=click.IntRange(min=1),
    help="End --watch sooner, once so many requests came.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("config.toml"),
    show_default=True,
    help="The file to write. One that is there is never changed: the command says how it differs.",
)
@click.option(
    "--compose", is_flag=True, help=f"Write {COMPOSE} beside it, too: all of it in containers on this host."
)
@click.option(
    "--kubernetes",
    is_flag=True,
    help=f"Write {VALUES} beside it, too: values for the Helm chart of quantdrift.",
)
@click.option("--yes", is_flag=True, help="Ask nothing; take what was found, and defaults.")
@JSON
def init(
    reference: str | None,
    candidate: Path | None,
    name: str,
    backend: str,
    tap: str,
    listen: str,
    watch_s: float | None,
    most_requests: int | None,
    out: Path,
    *,
    compose: bool,
    kubernetes: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Write a config.toml that fits a model, its server and its traffic.

    REFERENCE is the model before quantisation: an ONNX file, an exported program of PyTorch (.pt2, which is code and is run), a folder of a
    language model, or a model at a server, http://HOST:PORT/v2/models/NAME. Its outputs tell what is compared, and how. The server at --backend is asked for its protocol and its models. With --watch the command relays requests to it for a while, as
    the sidecar does, and finds the model's name, the rate, headers, parameters and values of the JSON that make slices, and edges of input features. At last it opens the
    reference and replays what came.

    With --compose and --kubernetes it also writes what runs that configuration in containers. No file that is there is changed: the command says what it would write otherwise.

    It asks where it cannot know, unless the input is no terminal, or with --yes. Exit code 2 if something cannot work.

    \b
    Examples:
      quantdrift init models/digits-fp32.onnx
      quantdrift init models/digits-fp32.onnx --candidate models/digits-int8.onnx --backend 127.0.0.1:8001 --watch 60
      quantdrift init models/digits-fp32.onnx --yes --json
      quantdrift init models/digits-fp32.onnx --compose
      quantdrift init models/digits-fp32.onnx --tap /run/quantdrift/tap
      quantdrift init http://127.0.0.1:8002/v2/models/digits-fp32 --backend 127.0.0.1:8001
    """
    _check_name(out, compose=compose)
    if tap and (backend or listen or watch_s or most_requests):
        raise OperatorError("--tap needs no --backend, --listen, --watch or --requests: nothing is relayed")
    asks = not yes and not as_json and sys.stdin.isatty()
    say = _Say(quiet=as_json)
    opened = _reference(reference, name, say)
    candidate_file = read_model_file(candidate) if candidate is not None else None
    names = tuple(filter(None, [name, opened.name if opened is not None else ""]))
    if tap:
        serving = _Serving(tap=str(Path(tap).resolve()))
    else:
        serving = _serving(backend, listen, watch_s, names, say, asks=asks)
    traffic = (
        _watched(serving.listen, serving.backend, serving.watch_s, most_requests or 0, quiet=as_json)
        if serving.watch_s
        else None
    )
    proposal = _proposed(name, opened, candidate_file, serving, traffic, out)
    kept = (
        tuple(entry for entry in traffic.kept if entry.model == proposal.name) if traffic is not None else ()
    )
    if asks:
        _ask_all(proposal)
    if proposal.person:
        proposal.notes.append(people_note(proposal.person))
    result = _written(proposal, opened, kept, out, quiet=as_json)
    deployment = list(_deployment(out, compose=compose, kubernetes=kubernetes))
    result = msgspec.structs.replace(result, deployment=deployment)
    if as_json:
        emit(result)
    else:
        click.echo(_shown(result, proposal))


class _Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How the candidate is reached.

    Parameters
    ----------
    tap
        The socket of a tap; empty: requests are relayed from `listen` to `backend`.
    is_there, server
        Whether anything answers at `backend`, and what it says of itself.
    watch_s
        For how long its traffic is watched.
    """

    tap: str = ""
    listen: str = ""
    backend: str = ""
    is_there: bool = True
    server: Server | None = None
    watch_s: float = 0.0


def _serving(
    backend: str, listen: str, watch_s: float | None, names: tuple[str, ...], say: "_Say", *, asks: bool
) -> _Serving:
    """Find the server, and ask for what is not known of it."""
    backend = _address(
        "--backend", backend or (_ask("Address of the inference server", _BACKEND) if asks else _BACKEND)
    )
    is_there = _is_there(backend, watch_s or 0.0)
    server = ask_server(backend, names) if is_there else None
    _say_server(backend, server, say)
    listen = _address(
        "--listen", listen or (_ask("Address for clients from now on", _LISTEN) if asks else _LISTEN)
    )
    if watch_s is None:
        watch_s = 60.0 if asks and is_there and click.confirm(_WATCH, default=False, err=True) else 0.0
    return _Serving(listen=listen, backend=backend, is_there=is_there, server=server, watch_s=watch_s)


def _proposed(
    name: str,
    opened: OpenedReference | None,
    candidate_file: ModelFile | None,
    serving: _Serving,
    traffic: Traffic | None,
    out: Path,
) -> Proposal:
    """Return what reference, candidate, server and traffic say together."""
    model_file = opened.file if opened is not None else None
    outputs = [spec.name for spec in model_file.outputs] if model_file else []
    stem = opened.name if opened is not None else ""
    model, notes = name_of(name, stem, serving.server, traffic, outputs)
    proposal = Proposal(
        listen=serving.listen,
        backend=serving.backend,
        tap=serving.tap,
        name=model,
        choice=_choice(opened, serving.server),
        notes=notes,
    )
    if not serving.is_there:
        proposal.notes.append(
            f"nothing answers at {serving.backend} now: start the inference server there, or correct sidecar.backend"
        )
    if opened is not None:
        _refer(proposal, opened.reference, out)
    if candidate_file is not None:
        proposal.notes += _of_candidate(candidate_file, model_file)
    if traffic is not None:
        _learn(proposal, traffic, opened, out)
    return proposal


def _written(
    proposal: Proposal,
    opened: OpenedReference | None,
    kept: tuple[Kept, ...],
    out: Path,
    *,
    quiet: bool,
) -> Initialised:
    """Write the configuration where none is, and try it on what came."""
    text = text_of(proposal)
    is_new = not out.exists()
    differing = [] if is_new else _differing(out, proposal, text)
    if is_new:
        _config_of(text, out)  # for an error before anything is written
        _write(out, text)
    checked: dict[str, str] = {}
    replayed = ""
    if opened is not None and is_new:
        checked, replayed, problems = _first_replays(
            out, kept[:_MOST_REPLAYED], everything=bool(opened.reference.url)
        )
        proposal.notes += problems
    planned = ""
    if checked and proposal.requests_per_s is not None:
        planned = _planned(out, proposal, quiet=quiet)
    return Initialised(
        file=str(out),
        written=is_new,
        config=text,
        differences=differing,
        notes=proposal.notes,
        checked=checked,
        replays=replayed,
        plan=planned,
    )


def _is_there(backend: str, watch_s: float) -> bool:
    """Return whether anything answers at an address, which is needed to watch its traffic."""
    is_there = accepts(backend)
    if watch_s and not is_there:
        raise OperatorError(
            f"nothing answers at {backend}, where --watch relays requests to: start the server, correct --backend, or leave --watch out"
        )
    return is_there


class _Say:
    """Prints what is found on stderr while the command goes on."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        if not self._quiet:
            click.echo(text, err=True)


def _check_name(out: Path, *, compose: bool) -> None:
    if compose and out.name != "config.toml":
        raise OperatorError(f"--compose needs a configuration called config.toml, and --out {out} is not")


def _ask(question: str, default: str) -> str:
    return str(click.prompt(question, default=default, err=True))


def _address(option: str, text: str) -> str:
    try:
        read_address(text)
    except AddressError as error:
        raise OperatorError(f"{option} {plain(text)}: {error}") from error
    return text


def _refer(proposal: Proposal, reference: Reference, out: Path) -> None:
    """Put a reference into the proposal; relative paths in a configuration begin at its own folder."""
    if reference.path:
        proposal.reference = os.path.relpath(Path(reference.path).resolve(), out.resolve().parent)
    if reference.runtime is not Runtime.ONNX:
        proposal.runtime = reference.runtime.value
    proposal.digest, proposal.url = reference.digest, reference.url
    proposal.served_as = reference.model if reference.model != proposal.name else ""


def _reference(text: str | None, name: str, say: _Say) -> OpenedReference | None:
    if text is None:
        say(
            "No reference is given: without the model before quantisation nothing can be compared. Name its file to the command."
        )
        return None
    if "://" in text:
        opened = served_reference(text, name)
        if opened.file is None:
            say(f"{text}: a language model at a server, {plain(opened.name)}")
        else:
            say(
                f"{text}: {plain(opened.name)}, whose precision its server alone knows; {_tensors(opened.file)}"
            )
        return opened
    path = Path(text)
    if not path.exists():
        raise OperatorError(f"{text}: there is no such file or folder{similar_file(path)}")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise OperatorError(
                f"{path} is a folder without config.json: name an ONNX file, or the folder of a language model"
            )
        say(f"{path}: a language model (transformers)")
        return OpenedReference(
            reference=Reference(runtime=Runtime.TRANSFORMERS, path=str(path)), name=path.stem
        )
    if path.suffix == PROGRAM:
        opened = program_reference(path)
        assert opened.file is not None
        say(f"{path}: an exported program of PyTorch, {opened.file.precision}; {_tensors(opened.file)}")
        return opened
    if path.suffix != ".onnx":
        raise OperatorError(
            f"{path} is no ONNX file and no exported program (.pt2). For other references in PyTorch write [[models.references]] by hand:"
            " docs/how-to/references.md"
        )
    model_file = read_model_file(path)
    if not model_file.is_full_precision:
        raise OperatorError(
            f"{path} is {model_file.precision}: name the model before quantisation, and this one with --candidate"
        )
    trees = "decision trees, " if model_file.is_trees else ""
    say(f"{path}: {trees}{model_file.precision}; {_tensors(model_file)}")
    return OpenedReference(reference=Reference(path=str(path)), name=path.stem, file=model_file)


def _tensors(model_file: ModelFile) -> str:
    inputs = ", ".join(str(spec) for spec in model_file.inputs)
    outputs = ", ".join(str(spec) for spec in model_file.outputs)
    return f"takes {inputs}; gives {outputs}"


def _say_server(backend: str, server: Server | None, say: _Say) -> None:
    if server is None:
        say(f"{backend}: nothing answers there now")
        return
    names = ", ".join(model.name for model in server.models[:_MOST_SHOWN])
    protocols = ", ".join(server.protocols)
    speech = f"speaks {protocols}" if protocols else "answers, in no protocol that is known by its addresses"
    say(f"{backend}: {plain(server.name) or 'a server'} {speech}{f'; its models: {names}' if names else ''}")


def _choice(opened: OpenedReference | None, server: Server | None) -> Choice:
    if opened is not None and opened.file is not None:
        return choose(opened.file, opened.rows or None)
    generates = server is not None and not GENERATED.isdisjoint(server.protocols)
    if opened is not None or generates:
        return Choice(task=Task.GENERATION, why="text is generated")
    return Choice(
        task=Task.CLASSIFICATION,
        why="not known without a reference",
        doubts=("set task to what the model does",),
    )


def _watched(listen: str, backend: str, seconds: float, most_requests: int, *, quiet: bool) -> Traffic:
    """Watch traffic with a progress bar."""
    if quiet:
        return asyncio.run(watch(listen, backend, seconds, most_requests))
    label = f"Relaying {listen} to {backend}"
    with click.progressbar(
        length=round(seconds), label=label, file=sys.stderr, item_show_func=_requests
    ) as bar:

        def show(n: int, elapsed_s: float) -> None:
            bar.update(max(0, min(round(elapsed_s), bar.length or 0) - bar.pos), n)

        return asyncio.run(watch(listen, backend, seconds, most_requests, show))


def _requests(n: Any) -> str:
    return f"{n:,} requests" if n else "no request yet: send traffic there"


def _learn(proposal: Proposal, traffic: Traffic, opened: OpenedReference | None, out: Path) -> None:
    """Put into the proposal what the traffic tells."""
    from quantdrift.init.replays import joined, recorded

    n = sum(model.n for model in traffic.models)
    proposal.notes.append(f"{n:,} inference requests came in {traffic.seconds:.0f} s")
    proposal.notes += [
        f"could not be read, {count}: {reason}"
        for reason, count in list(traffic.unread.items())[:_MOST_SHOWN]
    ]
    config = _config_of(text_of(proposal), out)
    exchanges, _ = recorded(config, [entry for entry in traffic.kept if entry.model == proposal.name])
    if opened is not None and opened.file is not None and exchanges:
        proposal.choice = choose(opened.file, joined(exchange.outputs for exchange in exchanges))
    use_traffic(proposal, traffic, joined(exchange.inputs for exchange in exchanges))


def _config_of(text: str, out: Path) -> Config:
    """Return the configuration that a text would be in its place, whatever the environment sets."""
    return config_of(Parts(tomllib.loads(text), {}), out, {})


def _of_candidate(candidate: ModelFile, reference: ModelFile | None) -> list[str]:
    """Return what follows from the form of the quantised file."""
    if candidate.is_trees:
        can = "diagnose and repair can name the columns whose thresholds damage a slice"
    elif candidate.has_sites:
        can = "diagnose and repair can name the layers that damage a slice"
    else:
        can = "it can be watched and gated, but diagnose cannot name its layers: it needs operators of floating point, such as the QDQ form has"
    notes = [f"the candidate is {candidate.precision}: {can}"]
    if reference is not None:
        common = {spec.name for spec in candidate.outputs} & {spec.name for spec in reference.outputs}
        if not common:
            ours, theirs = (", ".join(spec.name for spec in file.outputs) for file in (reference, candidate))
            notes.append(
                f"candidate and reference name no output alike ({theirs}; {ours}): set output to the candidate's, and"
                " models.references.output to the reference's"
            )
    return notes


def _ask_all(proposal: Proposal) -> None:
    """Ask what cannot be known; what was found is the default."""
    proposal.name = _ask("The model's name in requests", proposal.name)
    for (source, name), shares in list(proposal.groups.items()):
        values = ", ".join(list(shares)[:_MOST_SHOWN])
        more = ", ..." if len(shares) > _MOST_SHOWN else ""
        if not click.confirm(
            f"Record the {_SOURCES[source]} {name} ({values}{more}) and watch each value as a slice?",
            default=True,
            err=True,
        ):
            del proposal.groups[source, name]
            proposal.rare = tuple(entry for entry in proposal.rare if entry[0] != name)
    if proposal.person and not click.confirm(
        f"Does the header {proposal.person} name a person or session?", default=True, err=True
    ):
        proposal.person = ""
    if proposal.choice.task is not Task.GENERATION:
        proposal.flip = click.prompt(
            "Accepted share of changed answers",
            default=proposal.flip,
            type=click.FloatRange(0, 1, min_open=True, max_open=True),
            err=True,
        )
    proposal.otlp = click.prompt(
        "OpenTelemetry collector (empty: none)", default="", show_default=False, err=True
    )


def _differing(out: Path, proposal: Proposal, text: str) -> list[str]:
    """Return what was found and stands otherwise in the file that is there."""
    try:
        lines = differences(out.read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OperatorError(
            f"{out} is there and cannot be read: {error}. Name another file with --out"
        ) from error
    guessed = ("sampling.rate", "telemetry.") if proposal.requests_per_s is None else ("telemetry.",)
    return [line for line in lines if not line.startswith(guessed)]


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:  # never over another one
            file.write(text)
    except OSError as error:
        raise OperatorError(f"{out} cannot be written: {error.strerror or error}") from error


def _deployment(out: Path, *, compose: bool, kubernetes: bool) -> Iterator[WrittenFile]:
    """Write the files that run the configuration as it stands now, or say how those that are there differ."""
    if not compose and not kubernetes:
        return
    config, document = load(out, {}), read_parts(out).document
    files = []
    if compose:
        files.append(compose_file(document, out.resolve().parent, grace_s=config.sidecar.grace_s))
    if kubernetes:
        files.append(helm_values(document, memory_bytes=memory_bytes(config)))
    for file in files:
        path = out.parent / file.name
        is_new = not path.exists()
        differing: list[str] = []
        if is_new:
            _write(path, file.text)
        else:
            try:
                before = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise OperatorError(f"{path} is there and cannot be read: {error}") from error
            differing = list(
                difflib.unified_diff(
                    before.splitlines(), file.text.splitlines(), str(path), "proposed", lineterm="", n=1
                )
            )
        yield WrittenFile(file=str(path), written=is_new, differences=differing, notes=file.notes)


def _first_replays(out: Path, kept: Any, *, everything: bool) -> tuple[dict[str, str], str, list[str]]:
    """Open the references as the shadow does, and replay what was captured; return what came, and what is wrong."""
    from quantdrift.cli.release.reference_check import check_references
    from quantdrift.init.replays import replay

    config = load(out)
    checked = check_references(config, everything=everything)
    problems = [*checked.problems, *checked.notes]
    if checked.problems or not kept:
        return checked.artefacts, "", problems
    try:
        return checked.artefacts, str(replay(config, kept)), problems
    except QuantdriftError as error:
        return checked.artefacts, "", [*problems, str(error)]


def _planned(out: Path, proposal: Proposal, *, quiet: bool) -> str:
    """Return how long a drift would stay unseen in the slices that were seen, as `quantdrift plan` tells it."""
    import quantdrift

    names = slice_names(proposal.groups)
    slices = {
        f"{names[group]}={value}": share
        for group, shares in proposal.groups.items()
        for value, share in list(shares.items())[:_MOST_PLANNED]
    }
    with ProgressLine(quiet=quiet) as progress:
        return str(
            quantdrift.plan(
                config=out, model=proposal.name, rps=proposal.requests_per_s, slices=slices, progress=progress
            )
        )


def _shown(result: Initialised, proposal: Proposal) -> str:
    lines = []
    if result.written:
        lines += [
            f"{result.file} is written:",
            "",
            *(f"    {line}" for line in result.config.splitlines()),
            "",
        ]
    elif result.differences:
        lines += [
            f"{result.file} is there and was not changed. This was found otherwise:",
            *(f"  {line}" for line in result.differences),
            "",
            f"To have it written with all of this, move {result.file} away and type the command again.",
            "",
        ]
    else:
        lines += [f"{result.file} is there and says all that was found.", ""]
    lines += [f"- {note}" for note in result.notes]
    lines += [f"- {path}: {text}" for path, text in result.checked.items()]
    lines += [result.replays] if result.replays else []
    lines += (
        ["", "If one of these slices drifted to three times its budget:", result.plan, ""]
        if result.plan
        else []
    )
    lines += ["- Look at this: " + doubt for doubt in proposal.choice.doubts]
    for file in result.deployment:
        if file.written:
            lines += ["", f"{file.file} is written:"]
        elif file.differences:
            lines += ["", f"{file.file} is there and was not changed. It would be written so:"]
            lines += [f"  {line}" for line in file.differences]
        else:
            lines += ["", f"{file.file} is there and is the same."]
        lines += [f"- {note}" for note in file.notes]
    config = "" if result.file == "config.toml" else f" --config {result.file}"
    then = (
        f"start the server with QUANTDRIFT_TAP={proposal.tap} and record its exchanges: docs/how-to/tap.md"
        if proposal.tap
        else f"send traffic to {proposal.listen}"
    )
    run = (
        "QUANTDRIFT_PASSWORD=... docker compose up --detach"
        if any(Path(file.file).name == COMPOSE for file in result.deployment)
        else f"quantdrift up{config}"
    )
    lines += ["", f"Next: {run}, and {then}"]
    return "\n".join(lines)
