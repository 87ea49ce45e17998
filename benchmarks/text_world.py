"""The sentence-embedding transformer as a router of real text: four clients, and what goes wrong.

Before the onset `help` sends sentences, `wiki` sections, `import` and `report` both; `int8-1` serves. The budget is what
an owner would take from an offline evaluation: half as much again as the worst healthy slice shows.
"""

from pathlib import Path

import msgspec

from benchmarks.pools import TOP_K, Pool, balance, compare
from benchmarks.shifts import Case, Items, Source, Stage, World
from benchmarks.transformer.answers import ANSWERS, CURRENT, CUT, CUT_TOKENS, REBUILT, REFERENCE, read
from benchmarks.transformer.passages import Form
from quantdrift.core.config import Config
from quantdrift.core.config.schema import Budget, Model, Slice

NAME = "router"
_CLIENTS = ("help", "wiki", "import", "report")
_LENGTH = "feature.length"
_SLICES = (
    Slice(name="client", header="x-client", values=_CLIENTS),
    Slice(name="length", feature="length", edges=(32, 128)),
)
_LENGTHS = ("length<32", "length[32,128)", "length>=128")
_HEADROOM = 1.5
_SHARES = {"help": 0.3, "wiki": 0.3, "import": 0.2, "report": 0.2}
_MIXED = {"help": 0.72, "wiki": 0.04, "import": 0.04, "report": 0.2}
_LONG = 0.25
Pools = tuple[tuple[Pool, float], ...]


class _Answers:
    """Pools, each made when it is asked for first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pools: dict[tuple[Form, str], Pool] = {}

    def pool(self, form: Form, version: str = CURRENT) -> Pool:
        if (form, version) not in self._pools:
            answers = read(self._directory, form)
            self._pools[form, version] = compare(
                f"{form}, {version}",
                answers.logits[version],
                answers.logits[REFERENCE],
                answers.labels,
                # Ids are [items, tokens], served one by one: what the shadow calls their length is the tokens.
                [{_LENGTH: float(length)} for length in answers.lengths],
            )
        return self._pools[form, version]

    def usual(self, version: str = CURRENT) -> dict[str, Pools]:
        """Return what each client sends before the onset."""
        sentences, sections = self.pool(Form.SENTENCE, version), self.pool(Form.SECTION, version)
        both = ((sentences, 0.5), (sections, 0.5))
        return {"help": ((sentences, 1.0),), "wiki": ((sections, 1.0),), "import": both, "report": both}


def world(directory: Path = ANSWERS) -> World:
    """Return the world, from what was answered before (`benchmarks.transformer`)."""
    answers = _Answers(directory)

    def stage(
        instead: dict[str, Pools] | None = None,
        version: str = CURRENT,
        shares: dict[str, float] | None = None,
    ) -> Stage:
        sent = answers.usual(version) | (instead or {})
        return Stage(
            version=version,
            sources=tuple(
                Source(attributes={"header.x-client": client}, share=share, pools=sent[client])
                for client, share in (shares or _SHARES).items()
            ),
        )

    sentences = answers.pool(Form.SENTENCE)
    exact, bad = answers.pool(Form.SENTENCE, REFERENCE), answers.pool(Form.SENTENCE, REBUILT)
    few = balance(sentences, exact, bad)
    cases = (
        Case(
            name="code",
            told="import sends source code instead of prose",
            after=stage({"import": ((answers.pool(Form.CODE), 1.0),)}),
            shifted=("client=import",),
        ),
        Case(
            name="encoded",
            told="help begins to percent-encode its text",
            after=stage({"help": ((answers.pool(Form.ENCODED), 1.0),)}),
            shifted=("client=help",),
        ),
        Case(
            name="long prompts",
            told=f"a share of {_LONG:g} of report's passages is three times as long: 400 tokens in the median",
            after=stage(
                {
                    "report": (
                        (answers.pool(Form.LONG), _LONG),
                        *((pool, (1 - _LONG) / 2) for pool, _ in answers.usual()["report"]),
                    )
                }
            ),
            shifted=("length>=128",),
        ),
        Case(
            name="lost setting",
            told="version int8-2 was built with one scale per matrix instead of one per column",
            after=stage(version=REBUILT),
            shifted=("all", *(f"client={client}" for client in _CLIENTS), *_LENGTHS),
        ),
        Case(
            name="cut prompts",
            told=f"version int8-3 has the same weights, and its engine drops what follows {CUT_TOKENS} tokens",
            after=stage(version=CUT),
            shifted=("length>=128",),
        ),
        Case(
            name="mixed replicas",
            told=f"of the replicas behind help one answer in {1 / few:.1f} is int8-2's, the others' are FP32: same mean KL",
            after=stage({"help": ((exact, 1 - few), (bad, few))}),
            shifted=("client=help",),
        ),
        Case(
            name="mix only",
            told="help sends 72 % of the passages instead of 30; every client's are as before",
            after=stage(shares=_MIXED),
            shifted=(),
        ),
    )
    model = Model(name=NAME, output="logits", top_k=TOP_K)
    found = World(model=NAME, config=Config(models=(model,), slices=_SLICES), before=stage(), cases=cases)
    model = msgspec.structs.replace(model, budget=_budget(found))
    return msgspec.structs.replace(found, config=msgspec.structs.replace(found.config, models=(model,)))


def _budget(world: World) -> Budget:
    before = Items(world, world.before)
    healthy = [
        found
        for number in world.slices().values()
        if before.share(number) > 0.01 and (found := before.quality(number))
    ]
    return Budget(
        flip=round(_HEADROOM * max(one.flip for one in healthy), 3),
        divergence=round(_HEADROOM * max(one.divergence for one in healthy), 4),
    )
