"""The page of features: which files each one has, in the order in which to read them."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_LAYERS: Final = (
    ("cli", "demo", "plugins", "testing"),
    ("show", "release", "init"),
    ("sidecar", "shadow", "monitor", "report", "frames"),
    ("models",),
    ("storage", "drift"),
    ("facts",),
    ("core",),
)
# Name, what it is, and words: a file belongs to it if one of them is in its name, or in that of its folder.
_FEATURES: Final = (
    ("Relay", "The proxy on the serving path, which observes what it forwards.", "relay handoff"),
    ("Other ways in", "Taps, loggers, Envoy, and programs that send what they served.", "intake tap callers"),
    ("Protocols", "From bytes to named tensors, and from the capture process to the stream.", "protocols capture"),
    ("Sampling", "What is drawn, with which probability, and who changes that.", "sampling policy policies inclusion allocation pause pauses"),
    ("Replay", "From the stream through the reference to rows.", "pipeline replay references reference canaries runtimes tensors worker origin places comparisons speed"),
    ("Comparison", "What divergence is for each kind of output.", "comparators"),
    ("Language models", "Requests, answers and scores of text.", "language text openai chats histogram"),
    ("Slices", "Which part of the traffic an item belongs to, by name, by search or by cluster.", "slices slice discovery discovered clusters clustering novelty"),
    ("Detection", "From stored comparisons to verdicts.", "fold detectors evidence watch signals verdict verdicts thresholds exchanges"),
    ("Noise", "How far a model differs from itself, and what that takes off.", "noise recheck"),
    ("Baselines", "What a slice is compared with, and who decided that.", "baseline baselines"),
    ("Alerts", "What is sent, to whom, and what people do about it.", "alert alerts outbox notify events transition transitions"),
    ("Incidents", "The alerts of one cause, from onset to recovery.", "incident incidents"),
    ("Explanation", "Why a slice moved.", "explain explanation circumstances"),
    ("Figures", "Every number that a person sees, with its interval.", "figures figure estimate estimates"),
    ("Words", "Every sentence that a person reads.", "words"),
    ("Live page", "What people look at while it happens.", "page charts rendering timeline trends web"),
    ("Report and comparison", "What people look at afterwards.", "report compare"),
    ("Gate", "Whether a candidate is good enough, on every slice.", "gate calibration recording"),
    ("Load test", "How much load an endpoint takes, driven in the shape of recorded traffic.", "load_test"),
    ("Diagnosis and repair", "Which places of a candidate do the damage, and a copy without it.", "diagnose diagnosis repair repairs sites origin trees forms halves scales"),
    ("Quantise", "The cheapest quantised model that every slice accepts.", "quantise quantised recipes timing"),
    ("Python", "What a notebook or a script calls, and what it gets back.", "blocking connect chosen notes notebook progress result setting"),
    ("Exemplars", "The exchanges that are kept with their payload.", "exemplar exemplars said"),
    ("Labels", "Whether changed answers are wrong.", "label labels"),
    ("Cost", "What damage, replays and devices cost.", "cost costs price prices"),
    ("Latency", "Whether the candidate is fast enough.", "latency growth"),
    ("Accounts", "What was offered, taken, lost and never arrived.", "account accounting coverage loss losses tally tallies expired expiries expiry arrival flow"),
    ("Serving", "Which versions serve, which were replaced.", "serving retirement versions"),
    ("Identity and rights", "Who may do what, and who did.", "roles rights audit keys certificates setup login unknown"),
    ("Privacy", "What is stored of a person, and its erasure.", "privacy retention erase"),
    ("Configuration", "Options, defaults and checks.", "config config_summary reload"),
    ("First configuration", "What is found out of files, a server and traffic, and written.", "init"),
    ("Planning", "What a configuration would find, before it runs.", "plan planning backtest delay fleet"),
    ("Status and triage", "How far exchanges come, and which slices to look at first.", "status blockers guide triage signals worst usage diagnosable gauges"),
    ("Frames and export", "The drift tables for people with a notebook.", "frames export views"),
    ("Processes", "How each process starts, stops, restarts, and is seen from outside.", "process state supervisor serve up embedded outage data_directory service admin interrupt admission lag"),
    ("Stream", "The client of JetStream.", "stream nats"),
    ("Database", "Schema, migrations, connections, locks, and the rows that processes read and write.", "schema migrate revision database db locks leader shards server address rows read reading write writer copy columns partitions history traffic compilation binaries postgres temporary unprivileged snapshot queries"),
    ("Plug-ins", "What other packages add, and the tests that they must pass.", "plugins testing"),
    ("Demo", "The whole loop on digits, and on text.", "demo"),
    ("Shared", "What every feature uses.", "main options output whole clock codec errors logs tasks records telemetry tls links notation secrets sealing tensors arrays share shares interval speed dependence session sessions finding gathering period drawing"),
)  # fmt: skip


def features_markdown() -> str:
    """Return the page.

    Raises
    ------
    ValueError
        A file has no feature.
    """
    modules = [_Module(path) for path in _paths()]
    if lost := [
        module.shown
        for module in modules
        if not module.words & {word for *_, words in _FEATURES for word in words.split()}
    ]:
        raise ValueError(f"no feature of docs/features.py has {', '.join(lost)}")
    lines = [
        "# Features",
        "",
        "Generated from the code by `make docs`: the files of each feature in reading order, from the command to the tables; within a layer",
        "whoever imports stands before what it imports. A file has a feature if its name, or that of a folder it is in, says so;",
        "some have two.",
    ]
    for name, what, words in _FEATURES:
        own = [module for module in modules if module.words & {*words.split()}]
        lines += ["", f"## {name}", "", what, "", "| file | what it is |", "|---|---|"]
        lines += [
            f"| [`{module.shown}`](../../{module.shown}) | {module.sentence} |" for module in _in_order(own)
        ]
    return "\n".join(lines) + "\n"


class _Module:
    """A module: what its names say, what it is, and what it imports."""

    def __init__(self, path: Path) -> None:
        parts = path.relative_to(ROOT / "quantdrift").with_suffix("").parts
        self.layer = next(n for n, names in enumerate(_LAYERS) if parts[0] in names)
        self.name = ".".join(("quantdrift", *(part for part in parts if part != "__init__")))
        self.shown = str(path.resolve().relative_to(ROOT))
        named = parts if parts[0] in {"demo", "frames", "init"} else parts[1:]
        self.words = {word for part in named for word in (part, *part.split("_"))}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.sentence = (
            (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        )
        self.imports = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module is not None
        }


def _paths() -> Iterator[Path]:
    folders = {name for names in _LAYERS for name in names}
    for folder in sorted((ROOT / "quantdrift").iterdir()):
        if folder.name in folders:
            for path in sorted(folder.resolve().rglob("*.py")):
                if path.stat().st_size and not path.name.endswith("_pb2.py") and path.name != "__init__.py":
                    yield folder / path.relative_to(folder.resolve())


def _in_order(modules: Sequence[_Module]) -> list[_Module]:
    """Return them layer by layer; in a layer, those that nobody else imports first."""
    left, ordered = sorted(modules, key=lambda module: (module.layer, module.shown)), list[_Module]()
    while left:
        layer = left[0].layer
        here = [module for module in left if module.layer == layer]
        first = next(
            (
                module
                for module in here
                if not any(module.name in other.imports for other in here if other is not module)
            ),
            here[0],
        )
        ordered.append(first)
        left.remove(first)
    return ordered
