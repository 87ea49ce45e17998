"""The configuration: loading, overriding, refusing, explaining."""

import re
import typing
from pathlib import Path

import msgspec
import pytest

from quantdrift.cli.config_summary import explain, memory_bytes
from quantdrift.core.config import Config, Provider, Role, Stream, load, load_secrets
from quantdrift.core.config.address import read_address
from quantdrift.core.config.schema import Capture, Intake
from quantdrift.core.config.wrong_values import allowed, struct_in
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import TextAttribute
from quantdrift.core.tasks import Task

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-thirty-two-characters"
ROOT = Path(__file__).resolve().parents[2]
MODEL = '[[models]]\nname = "m"\n[[models.references]]\npath = "m.onnx"\nversions = ["int8-*", "7"]\n'


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_the_annotated_file_at_the_root_states_the_defaults() -> None:
    """Loading `config.toml` gives what the code gives, apart from paths made absolute."""
    config = load(ROOT / "config.toml", {})
    assert config == Config()


def test_the_first_lines_of_the_annotated_file_are_a_configuration(tmp_path: Path) -> None:
    """Those that everybody sets: uncommented they load, without a contradiction."""
    block = (ROOT / "config.toml").read_text().split("THE TEN THAT EVERYBODY SETS", 1)[1]
    block = block[block.index("# [") :].split("# EVERY OPTION", 1)[0]
    text = "\n".join(line.removeprefix("# ").removeprefix("#") for line in block.splitlines())
    config = load(_file(tmp_path, text), {})
    assert config.model("digits") is not None
    assert config.storage.dsn_file == "/etc/quantdrift/dsn"
    assert config.telemetry.otlp_endpoint == "https://otel-collector:4317"
    assert [rule.header for rule in config.slices] == list(config.capture.headers)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[sidecar]\nworkerz = 2", "did you mean `workers`"),
        ("[sidcar]\nworkers = 2", "did you mean `sidecar`"),
        (MODEL + 'pth = "x"', "did you mean `path`"),
        ('[[slices]]\nname = "a"\nheadr = "x"', "did you mean `header`"),
        ("[sampling]\nqqq = 1", "known are: "),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path, text: str, hint: str) -> None:
    """A typing error never becomes a silent default."""
    with pytest.raises(OperatorError, match=hint):
        load(_file(tmp_path, text), {})


def test_a_name_far_from_all_known_ones_is_not_mistaken_for_one(tmp_path: Path) -> None:
    """`income` is no misspelt `norm`."""
    rule = '[[slices]]\nname = "a"\nfeature = "income"\nedges = [1.0]'
    with pytest.raises(OperatorError, match=r"one of `length`, .*`value`$"):
        load(_file(tmp_path, rule), {})


def test_the_case_of_a_header_does_not_matter(tmp_path: Path) -> None:
    """Slices, hashes and body strata get the spelling of `capture.headers`, which is that of the recorded attribute."""
    text = (
        '[capture]\nheaders = ["x-tier", "X-User"]\nhmac = ["header.x-user"]\n'
        '[[slices]]\nname = "tier"\nheader = "X-Tier"\nvalues = ["gold"]\n'
        '[[sampling.body_strata]]\nname = "gold"\nrate = 1.0\n'
        'where = [{ key = "header.X-TIER", equals = "gold" }]\n'
    )
    config = load(_file(tmp_path, text), {})
    assert [rule.header for rule in config.slices] == ["x-tier"]
    assert config.capture.hmac == ("header.X-User",)
    assert config.sampling.body_strata[0].where[0].key == "header.x-tier"
    with pytest.raises(OperatorError, match=r"header.X-Team is not recorded"):
        load(_file(tmp_path, text.replace("X-Tier", "X-Team")), {})


TORCH = MODEL.replace('"m.onnx"', '"{path}"\nruntime = "torch"')
TOLD = '[[models.inputs]]\nname = "x"\ndatatype = "{datatype}"\nshape = {shape}\n'


def _input(name: str, options: str = "") -> str:
    return f'\n[[models.references.inputs]]\nname = "{name}"\n{options}\n'


def _torch(path: str, options: str = "", *, told: str = "") -> str:
    return TORCH.replace("{path}", path) + options + "\n" + told


def _copied(options: str) -> str:
    text = MODEL.replace('name = "m"', 'name = "m"\ntask = "generation"', 1)
    text = text.replace('path = "m.onnx"', 'runtime = "transformers"\npath = "fp32"')
    return f"{text}[models.references.copy]\n{options}"


def _remote(runtime: str, url: str) -> str:
    return MODEL.replace('path = "m.onnx"', f'runtime = "{runtime}"\nurl = "{url}"')


def _told(datatype: str = "FP32", shape: str = "[-1, 4]") -> str:
    return TOLD.replace("{datatype}", datatype).replace("{shape}", shape)


def test_a_column_is_named_as_the_model_names_it(tmp_path: Path) -> None:
    """The number of the column stands in its place, so that a slice is the same by name and by number."""
    text = MODEL.replace("[[models.ref", 'columns = ["age", "income"]\n[[models.ref')
    rules = (
        '[[slices]]\nname = "a"\nfeature = "value"\ncolumn = "income"\nedges = [1.0]\n'
        '[[slices]]\nname = "b"\nfeature = "missing"\ncolumn = "age"\nedges = [0.5]\n'
    )
    assert [rule.column for rule in load(_file(tmp_path, text + rules), {}).slices] == [1, 0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (MODEL.replace('path = "m.onnx"\n', ""), "without a path.*runtime `onnx` needs `path`"),
        (
            MODEL + 'factory = "a:b"',
            "m.onnx: `factory` belongs to runtime `torch`, and the runtime here is `onnx`",
        ),
        (MODEL + "compile = true", "`compile` belongs to runtime `torch`"),
        (
            MODEL + 'runtime = "tensorrt"',
            r'references\[0\]\.runtime = "tensorrt": it must be one of `onnx`, `torch`',
        ),
        (MODEL + 'digest = "md5:1"', "digest"),
        (MODEL + 'factory = "not a name"', "factory"),
        (_torch("m.onnx"), "takes an exported program"),
        (_torch("m.pt2", 'factory = "a.b:c"', told=_told()), "weights of a `factory` are a file"),
        (_torch("m.safetensors"), "safetensors weights with a `factory`"),
        (_torch("m.pt", "compile = true", told=_told()), "cannot be compiled"),
        (_torch("m.pt"), "has no description of its inputs"),
        (_torch("m.pt2", "buckets = [8, 8]"), "`buckets` must rise"),
        (_torch("m.pt2", "cuda_graphs = true"), "`cuda_graphs` needs `buckets`"),
        (_torch("m.pt2", "buckets = [1, 2, 3, 4, 5, 6, 7, 8, 9]"), "buckets"),
        (
            _torch("m.pt2", "buckets = [4]").replace("[[models.ref", "batched = false\n[[models.ref"),
            "there are no batches",
        ),
        (MODEL + 'runtime = "transformers"', "`transformers` and task `classification` do not go together"),
        (
            MODEL.replace('name = "m"', 'name = "m"\ntask = "generation"', 1),
            "`onnx` and task `generation` do not go together: use runtime `transformers` or `openai`",
        ),
        (_copied('versions = ["7"]'), "needs `url` or `path`"),
        (_copied('url = "https://vllm-int8:8000"'), "`versions` is empty"),
        (_copied('path = "fp32"\nversions = ["7"]'), "is the reference itself"),
        (_copied('path = "int8"\nurl = "https://t"\nversions = ["7"]'), "give only one of `url` and `path`"),
        (_copied('path = "int8"\nmodel = "n"\nversions = ["7"]'), "belong to `url`, not to `path`"),
        (MODEL + '[models.references.copy]\npath = "p"\nversions = ["7"]', r"copy\] belongs to task `gen"),
        (MODEL + "[models.generation]\ntop = 5", r"models\.generation\] belongs to task `generation`"),
        (MODEL + 'url = "http://triton:8000"', "`url` belongs to runtime `oip-http` or `oip-grpc`"),
        (
            MODEL + "canary_interval_s = 5.0",
            "`canary_interval_s` belongs to runtime `oip-http` or `oip-grpc` or `openai`",
        ),
        (MODEL + "timeout_s = 5.0", "`timeout_s` belongs to runtime `oip-http` or `oip-grpc`"),
        (MODEL + 'runtime = "oip-http"\nurl = "http://triton:8000"', "`path` belongs to runtime `onnx` or"),
        (_remote("oip-http", "grpc://triton:8001"), "`oip-http` needs `url`, https://HOST:PORT or http:"),
        (_remote("oip-grpc", "http://triton:8000"), "`oip-grpc` needs `url`, grpcs://HOST:PORT or grpc:"),
        (_remote("oip-grpc", ""), "needs `url`"),
        (
            _remote("openai", "https://t").replace('name = "m"', 'name = "m"\ntask = "embedding"', 1)
            + 'canaries = "c.safetensors"',
            "embeddings of texts at a server cannot have canaries",
        ),
        (MODEL + _input("x", "zero_point = 3"), "inputs `x`: `zero_point` needs `scale`"),
        (MODEL + _input("x", "cast = true\nscale = 0.1"), "`scale` casts already"),
        (MODEL + _input("x") + _input("x", 'captured = "y"'), "gives `x` 2 times"),
        (MODEL + _input("x", 'captured = "z"') + _input("z"), "takes from `z` 2 times"),
        (MODEL + 'output = "fp32"', "name the candidate's output in `models.output` too"),
        (MODEL + "output_zero_point = 3", "needs `output_scale`"),
        (_remote("oip-http", "http://user:word@triton"), "url"),
        (_remote("oip-http", "https://t") + "compile = true", "`compile` belongs to runtime `torch`"),
        (_torch("m.pt", told=_told("BYTES")), "cannot take BYTES"),
        (_torch("m.pt", told=_told(shape="[]")), "no description of its shape"),
    ],
)
def test_options_that_do_not_fit_a_reference_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """Each is named with the runtime it belongs to, or with what is missing."""
    with pytest.raises(OperatorError, match=complaint):
        load(_file(tmp_path, text), {})


@pytest.mark.parametrize(
    "text",
    [
        MODEL + f'digest = "sha256:{"0" * 64}"\ncanaries = "c.safetensors"\ncanary_tolerance = 1e-3',
        MODEL + _input("x", 'captured = "image"\nscale = 0.1\nzero_point = -3') + _input("y", "cast = true"),
        _torch("m.pt2", "compile = true\nbuckets = [1, 8, 64]\ncuda_graphs = true"),
        _torch("m.safetensors", 'factory = "a.b:c"\ncompile = true', told=_told()),
        _torch("m.safetensors.index.json", 'factory = "a.b:c"', told=_told()),
        _torch("m.anything", told=_told()),
        _remote("oip-http", "https://triton.models:8000/prefix") + 'model = "d"\ntoken_file = "token"',
        _remote("oip-http", "https://t") + 'allow_reduced_precision = ["float16"]',
        _remote("oip-grpc", "grpcs://triton:8001") + 'model_version = "3"\ntimeout_s = 2.5',
        _copied('url = "https://vllm-int8:8000"\nmodel = "n"\nversions = ["7"]\nprecision = "awq"'),
        _copied('path = "int8"\nversions = ["7"]'),
    ],
)
def test_options_that_fit_a_reference_are_taken(tmp_path: Path, text: str) -> None:
    """Without a runtime it is ONNX."""
    reference = load(_file(tmp_path, text), {}).models[0].references[0]
    assert f'runtime = "{reference.runtime}"' in text or reference.runtime == "onnx"
    assert reference.token_file in {"", str(tmp_path / "token")}
    assert reference.canaries in {"", str(tmp_path / "c.safetensors")}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[sampling]\nrate = 1.5", "rate"),
        ('[sidecar]\nlisten = "8000"', "HOST:PORT"),
        ("[sidecar]\ndrain_delay_s = 30", "drain_delay_s"),
        ("[sidecar]\nmax_exchange_bytes = 999_999_999\nmax_held_bytes = 1_000_000_000", "max_held_bytes"),
        ('[capture]\nhmac = ["header.x-user"]', "not recorded"),
        ('[[slices]]\nname = "a"', "exactly one of"),
        ('[[slices]]\nname = "a"\ntime = "month"', "slices.*time"),
        (
            '[capture]\ntime_zone = "Europe/Berln"',
            "time_zone is `Europe/Berln`.*did you mean `Europe/Berlin`",
        ),
        ('[capture]\ntime_zone = "/etc"', "which is no time zone: write a name"),
        ('[[slices]]\nname = "a"\nheader = "x-b"', "capture.headers"),
        ('[[slices]]\nname = "a"\nfeature = "mean"', "edges"),
        ('[[slices]]\nname = "a"\nfeature = "value"\nedges = [1.0]', "the feature `value` needs `column`"),
        (
            '[[slices]]\nname = "a"\nfeature = "mean"\ncolumn = 1\nedges = [1.0]',
            "`column` belongs to the features `value` and `missing`",
        ),
        (
            '[[slices]]\nname = "a"\nfeature = "value"\ncolumn = 1\nedges = [1.0]\nvalues = ["1"]',
            "needs `edges`, one or more numbers that rise, or `values`",
        ),
        ('[[slices]]\nname = "a"\nfeature = "value"\ncolumn = 1\nvalues = ["north"]', "`north` is none"),
        (
            '[[slices]]\nname = "a"\nfeature = "value"\ncolumn = "age"\nedges = [1.0]',
            "models.columns names none",
        ),
        (
            MODEL.replace("[[models.ref", 'columns = ["age"]\n[[models.ref')
            + '[[slices]]\nname = "a"\nfeature = "value"\ncolumn = "aeg"\nedges = [1.0]',
            "no column `aeg`: did you mean `age`",
        ),
        (
            '[capture]\njson = ["a.b"]\n[[slices]]\nname = "a"\njson = "a.b"\nedges = [1.0]\nvalues = ["1"]',
            "`edges` and `values` exclude each other",
        ),
        ('[[slices]]\nname = "a"\ntime = "week"\nedges = [1.0]', "by feature or by JSON path"),
        ('[[slices]]\nname = "a"\nfeature = "value"\ncolumn = -1\nedges = [1.0]', "counted from 0"),
        ('[[slices]]\nname = "a"\ntime = "week"\ncolumn = 1', "`column` belongs to a slice by feature"),
        ('[[slices]]\nname = "a"\nmodel = "n"\nfeature = "mean"\nedges = [1.0]', "no model `n`"),
        (MODEL + MODEL, "used 2 times"),
        (MODEL.replace("[[models.ref", 'embedding = "features"\n[[models.ref'), "no .*names a feature"),
        (MODEL.replace("[[models.ref", 'adapter = "xml"\n[[models.ref'), "adapter"),
        (MODEL.replace("[[models.ref", 'labels = ["a", "a"]\n[[models.ref'), "labels names a class twice"),
        (MODEL + '[[models.inputs]]\nname = "x"\ndatatype = "FLOAT"', "datatype"),
        (
            MODEL + '[[models.inputs]]\nname = "x"\ndatatype = "FP32"\nshape = [-2]',
            "a dimension must be its size, or -1",
        ),
        (MODEL + '[[models.outputs]]\nname = "x"\ndatatype = "FP32"\n' * 2, "names `x` 2 times"),
        ('[[sampling.header_strata]]\nname = "default"\nrate = 1.0', "`default` is reserved"),
        ('[[sampling.header_strata]]\nname = "a"\nrate = 2.0', "`rate` must be a number from 0 to 1"),
        ('[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { X-A = "b" }', "lower case"),
        ('[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { "x a" = "b" }', "without spaces"),
        ('[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { x-a = "" }', "empty value"),
        ('[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { x-a = " b" }', "white space"),
        ('[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { x-a = "bär" }', "printable ASCII"),
        (
            '[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { x-a = "b\\tc" }',
            "printable ASCII",
        ),
        (
            f'[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = {{ x-a = "{"1" * 256}" }}',
            "shorter than 256 bytes",
        ),
        (
            '[capture]\nheaders = ["x-a"]\nhmac = ["header.x-a"]\n[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { x-a = "b" }',
            "hashed",
        ),
        (
            '[capture]\nheaders = ["X-A"]\nhmac = ["header.X-A"]\n[[sampling.header_strata]]\nname = "a"\nrate = 1.0\nheaders = { x-a = "b" }',
            "hashed",
        ),
        ("[telemetry]\nlog_level = 3", "str"),
        ("[telemetry]\nevaluations = true", "telemetry.evaluations needs telemetry.otlp_endpoint"),
        ("not toml", "cannot be read"),
    ],
)
def test_what_contradicts_itself_is_refused_in_words(tmp_path: Path, text: str, complaint: str) -> None:
    """Each check names the option that must change."""
    with pytest.raises(OperatorError, match=complaint):
        load(_file(tmp_path, text), {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            'backend = "http://127.0.0.1:8001"',
            'sidecar.backend is `http://127.0.0.1:8001`: it is a URL, and it must be HOST:PORT: write backend = "127.0.0.1:8001"',
        ),
        ('backend = "https://u:secret@model:8001/v2"', 'write backend = "model:8001"'),
        ('listen = "8000"', 'write listen = "127.0.0.1:8000"'),
        ('admin = ":9464"', 'the host is missing: write admin = "0.0.0.0:9464"'),
        ('backend = "::1:8001"', 'an IPv6 address needs brackets: write backend = "[::1]:8001"'),
        ('backend = "127.0.0.1:99999"', "the highest port is 65535"),
        ('backend = "127.0.0.1:x"', "the port is not a number"),
        ('backend = "127.0.0.1:"', "the port is not a number"),
        ('backend = "127.0.0.1:0"', "nobody can connect to port 0"),
        ('backend = "a b:8001"', "the host is neither a name nor an IP address"),
        (f'backend = "{"x" * 70}:8001"', "the host is not a valid name"),
        ('admin = "0.0.0.0:8000"', "give each of them a port of its own"),
        ('[intake]\nlisten = "0.0.0.0:9464"', "give each of them a port of its own"),
        ('[shadow]\nadmin = "9465"', "shadow.admin is `9465`"),
        ('[monitor]\nadmin = "http://h:1"', "monitor.admin is `http://h:1`: it is a URL"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_right_form(
    tmp_path: Path, text: str, complaint: str
) -> None:
    """All options that are HOST:PORT are read in one way; the line names file and option, and no password."""
    path = _file(tmp_path, f"[sidecar]\n{text}")
    with pytest.raises(OperatorError) as raised:
        load(path, {})
    assert complaint in str(raised.value)
    assert str(path) in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("listen", "backend"),
    [
        ("0.0.0.0:8000", "127.0.0.1:8000"),
        ("0.0.0.0:8000", "127.0.0.2:8000"),
        ("0.0.0.0:8000", "0.0.0.0:8000"),
        ("0.0.0.0:8000", "localhost:8000"),
        ("127.0.0.1:8000", "localhost:8000"),
        ("localhost:8000", "[::1]:8000"),
        ("[::]:8000", "127.0.0.1:8000"),
        ("[::]:8000", "[::1]:8000"),
        ("[::1]:8000", "[0:0::1]:8000"),
        ("10.0.0.5:8000", "10.0.0.5:8000"),
        ("pod:8000", "POD:8000"),
        ("127.0.0.1:8000", "127.0.0.1:9464"),
    ],
)
def test_a_sidecar_before_itself_is_refused(tmp_path: Path, listen: str, backend: str) -> None:
    """It would pass each connection on to itself until no file is left."""
    with pytest.raises(OperatorError, match="where the sidecar itself listens"):
        load(_file(tmp_path, f'[sidecar]\nlisten = "{listen}"\nbackend = "{backend}"'), {})


@pytest.mark.parametrize(
    ("listen", "backend"),
    [
        ("127.0.0.1:8000", "127.0.0.2:8000"),
        ("0.0.0.0:8000", "[::1]:8000"),
        ("0.0.0.0:8000", "model:8000"),
        ("0.0.0.0:8000", "10.0.0.5:8000"),
        ("[::]:8000", "[2001:db8::1]:8000"),
        ("127.0.0.1:0", "my_model.default.svc:8000"),
    ],
)
def test_another_address_with_the_same_port_is_taken(tmp_path: Path, listen: str, backend: str) -> None:
    """Containers that share no network often have the same port: only what is surely the sidecar is refused."""
    config = load(_file(tmp_path, f'[sidecar]\nlisten = "{listen}"\nbackend = "{backend}"'), {})
    assert str(read_address(config.sidecar.backend)) == backend


def test_a_mistake_in_a_slice_hides_none_elsewhere(tmp_path: Path) -> None:
    """Although `time` is a word in both lines."""
    path = _file(
        tmp_path,
        '[capture]\ntime_zone = "Europe/Berln"\n[[slices]]\nname = "a"\ntime = "month"\n',
    )
    with pytest.raises(OperatorError) as raised:
        load(path, {})
    assert [
        line.partition(".toml: ")[2].partition(" ")[0] for line in str(raised.value).splitlines()[1:]
    ] == [
        "slices[a].time",
        "capture.time_zone",
    ]


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    """Wrong keys, wrong values and contradictions; each line names the file, the option and what is allowed."""
    (tmp_path / "models.d").mkdir()
    part = tmp_path / "models.d" / "wine.toml"
    part.write_text('[[models]]\nname = "wine"\nbackground = -2\nlabels = ["a", "a"]\n')
    path = _file(
        tmp_path,
        '[sampling]\nrate = 5\nrte = 1\n[telemetry]\nlog_level = "inf"\nlog_json = "yes"\ntrace_url = 1\n'
        '[capture]\nheaders = "x-a"\n[[models]]\ntask = "clas"\noutput_kind = "logitz"\n'
        '[intake]\nlisten = 8002\n[sidecar]\nlisten = "8000"\n'
        '[[slices]]\nname = "a"\nheader = "x-b"\n[[slices]]\nname = "all"\nparameter = "p"\n',
    )
    tasks = ", ".join(f"`{task}`" for task in Task)
    levels, kinds = "`debug`, `info`, `warning`, `error`", "`logits`, `probabilities`"
    with pytest.raises(OperatorError) as raised:
        load(path, {"QUANTDRIFT__SIDECAR__WORKERS": "99", "QUANTDRIFT__SIDCAR__WORKERS": "9"})
    assert str(raised.value).splitlines() == [
        "the configuration is wrong:",
        "  - QUANTDRIFT__SIDCAR__WORKERS: there is no section `sidcar`: did you mean `sidecar`?",
        f"  - {path}: sampling.rate = 5: it must be a number from 0 to 1",
        f"  - {path}: unknown option `sampling.rte`: did you mean `rate`?",
        f'  - {path}: telemetry.log_level = "inf": it must be a string, one of {levels}. Did you mean `info`?',
        f'  - {path}: telemetry.log_json = "yes": it must be true or false',
        f"  - {path}: telemetry.trace_url = 1: it must be a string",
        f'  - {path}: capture.headers = "x-a": it must be a list, with a string for each entry',
        f'  - {path}: models[0].task = "clas": it must be one of {tasks}. Did you mean `classification`?',
        f'  - {path}: models[0].output_kind = "logitz": it must be one of {kinds}. Did you mean `logits`?',
        f"  - {path}: models[0]: `name` is missing",
        f"  - {part}: models[wine].background = -2: it must be a whole number at least -1",
        f"  - {path}: intake.listen = 8002: it must be a string",
        "  - QUANTDRIFT__SIDECAR__WORKERS: sidecar.workers = 99: it must be a whole number from 1 to 32",
        f'  - {path}: sidecar.listen is `8000`: it must be HOST:PORT: write listen = "127.0.0.1:8000"',
        f"  - {part}: models `wine`: labels names a class twice",
        f"  - {path}: slices: the name `all` is reserved for the slice of all traffic: choose another name",
        f"  - {path}: slices `all`: parameter.p is not recorded, add it to capture.parameters",
    ]


def test_a_contradiction_in_the_environment_names_its_variable(tmp_path: Path) -> None:
    """The file is not what has to be changed then."""
    with pytest.raises(OperatorError, match=r"- QUANTDRIFT__SIDECAR__BACKEND: sidecar\.backend"):
        load(_file(tmp_path, ""), {"QUANTDRIFT__SIDECAR__BACKEND": "http://127.0.0.1:8001"})


def test_every_option_says_in_words_what_it_takes() -> None:
    """No type of an option is without words."""
    kinds: list[type[msgspec.Struct]] = [Config]
    seen = set()
    while kinds:
        kind = kinds.pop()
        if kind in seen:
            continue
        seen.add(kind)
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if inner := struct_in(hint):
                kinds.append(inner)
            else:
                assert "another type" not in allowed(hint), f"{kind.__name__}.{name}"
    assert len(seen) > 20


def test_all_contradictions_are_listed_at_once(tmp_path: Path) -> None:
    """Nobody mends one line only to be told of the next."""
    with pytest.raises(OperatorError) as raised:
        load(
            _file(tmp_path, '[sidecar]\nlisten = "x"\nbackend = "y"\n[[slices]]\nname = "all"\nheader = "q"'),
            {},
        )
    assert str(raised.value).count("\n  - ") == 4


def test_the_environment_overrides_any_option(tmp_path: Path) -> None:
    """Strings as they are, everything else as JSON, lists whole."""
    config = load(
        _file(tmp_path, MODEL + "[sidecar]\nworkers = 1"),
        {
            "QUANTDRIFT__SIDECAR__WORKERS": "3",
            "QUANTDRIFT__SIDECAR__LISTEN": "127.0.0.1:1",
            "QUANTDRIFT__SHADOW__PROVIDER": "cpu",
            "QUANTDRIFT__CAPTURE__HEADERS": '["x-a", "x-b"]',
            "QUANTDRIFT__SLICES": '[{"name": "a", "header": "x-a"}]',
            "QUANTDRIFT_DSN": "not an option",
        },
    )
    assert config.sidecar.workers == 3
    assert config.sidecar.listen == "127.0.0.1:1"
    assert config.shadow.provider is Provider.CPU
    assert config.slices[0].header == "x-a"
    with pytest.raises(OperatorError, match="no section `sidcar`"):
        load(_file(tmp_path, ""), {"QUANTDRIFT__SIDCAR__WORKERS": "3"})
    with pytest.raises(OperatorError, match="not JSON"):
        load(_file(tmp_path, ""), {"QUANTDRIFT__SIDECAR__WORKERS": "three"})


def test_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    """The working directory of a process does not matter."""
    config = load(_file(tmp_path, MODEL), {})
    assert config.models[0].references[0].path == str(tmp_path / "m.onnx")


def test_a_sidecar_never_learns_the_address_of_the_database(tmp_path: Path) -> None:
    """Secrets are per role, and their `repr` shows nothing."""
    environment = {"QUANTDRIFT_DSN": "postgresql://u:hunter2@h/d", "QUANTDRIFT_SAMPLING_SALT": "s"}
    config = load(_file(tmp_path, ""), {})
    sidecar = load_secrets(config, Role.SIDECAR, environment)
    assert sidecar.dsn == ""
    assert sidecar.salt == b"s"
    monitor = load_secrets(config, Role.MONITOR, environment)
    assert monitor.dsn.endswith("@h/d")
    assert "hunter2" not in repr(monitor)
    with pytest.raises(OperatorError, match="QUANTDRIFT_DSN"):
        load_secrets(config, Role.SHADOW, {})


def test_secrets_come_from_files(tmp_path: Path) -> None:
    """A named file wins over the environment; one that is missing is an error, not an empty secret."""
    (tmp_path / "dsn").write_text("postgresql://file\n")
    config = load(_file(tmp_path, '[storage]\ndsn_file = "dsn"'), {})
    assert load_secrets(config, Role.SHADOW, {"QUANTDRIFT_DSN": "other"}).dsn == "postgresql://file"
    (tmp_path / "dsn").unlink()
    with pytest.raises(OperatorError, match="secret file"):
        load_secrets(config, Role.SHADOW, {})


def test_a_hashed_attribute_needs_its_key(tmp_path: Path) -> None:
    """A personal value is never recorded in the clear because a key was forgotten."""
    text = '[capture]\nheaders = ["x-user"]\nhmac = ["header.x-user"]'
    config = load(_file(tmp_path, text), {})
    with pytest.raises(OperatorError, match="QUANTDRIFT_HMAC_KEY"):
        load_secrets(config, Role.SIDECAR, {})
    assert load_secrets(config, Role.SIDECAR, {"QUANTDRIFT_HMAC_KEY": TOKEN}).hmac_key == TOKEN.encode()


def test_a_reference_server_without_canaries_is_reported(tmp_path: Path) -> None:
    """Of a server nothing can be proven: without canaries it may hold any model. A file is what it is."""
    server = '[[models]]\nname = "m"\n[[models.references]]\nruntime = "oip-http"\nurl = "https://t:8000"\n'
    held = server + 'canaries = "c.safetensors"\n'
    file = '[[models]]\nname = "m"\n[[models.references]]\npath = "m.onnx"\n'
    told = [
        any(
            "https://t:8000/m has no canaries" in note
            for note in explain(load(_file(tmp_path, text), {})).notes
        )
        for text in (server, held, file)
    ]
    assert told == [True, False, False]


def test_the_cost_of_a_sticky_sample_is_reported(tmp_path: Path) -> None:
    """That a user counts once is said before it is deployed, and only then."""
    sticky = load(_file(tmp_path, '[sampling]\nsticky_header = "x-user"'), {})
    assert any("count as one observation" in note for note in explain(sticky).notes)
    assert not any("one observation" in note for note in explain(load(_file(tmp_path, ""), {})).notes)


def test_credentials_in_an_address_are_not_shown() -> None:
    """Logs, messages and `config show` name the servers alone."""
    assert Stream(url="nats://user:hunter2@a:1,nats://token@b:2").address == "nats://a:1,nats://b:2"


def test_the_explanation_adds_up(tmp_path: Path) -> None:
    """Rates, caps, slices and the memory limit follow from the options."""
    text = (
        MODEL
        + '[capture]\nheaders = ["x-a"]\n[sampling]\nrate = 0.5\nbody_rate = 0.1\nmax_exchanges_per_s = 20\n'
        + '[[sampling.header_strata]]\nname = "rare"\nheaders = { x-a = "r" }\nrate = 1.0\n'
        + '[[sampling.body_strata]]\nname = "thin"\nrate = 1.0\n'
        + 'where = [{ key = "feature.candidate_margin", high = 0.2 }]\n'
        + '[[slices]]\nname = "a"\nheader = "x-a"\nvalues = ["r"]\n[[slices]]\nname = "b"\nheader = "x-a"\n'
        + '[[slices]]\nname = "mean"\nfeature = "mean"\nedges = [0.0]\n'
    )
    config = load(_file(tmp_path, text), {})
    explanation = explain(config, requests_per_s=1000)
    assert explanation.expected_replays_per_s == 20
    assert [(s.name, s.replayed_low, s.replayed_high) for s in explanation.strata] == [
        ("rare", 0.1, 1.0),
        ("default", 0.1, 0.5),
    ]
    assert explanation.models[0].slices == ["all", "a=r", "mean<0", "mean>=0"]
    assert explanation.models[0].open_slices == ["b=* (at most 32)"]
    bigger = msgspec.structs.replace(
        config,
        sidecar=msgspec.structs.replace(config.sidecar, max_held_bytes=config.sidecar.held_bytes + 2**20),
    )
    assert (
        memory_bytes(bigger) == memory_bytes(config) + 2 * 2**20
    )  # with what waits in the two queues behind
    crowded = msgspec.structs.replace(
        config, sidecar=msgspec.structs.replace(config.sidecar, max_connections=10_000, workers=2)
    )
    assert memory_bytes(crowded) > memory_bytes(config) + 2 * 8_000 * 20_000
    speaking = msgspec.structs.replace(config, capture=Capture(text=(TextAttribute.LANGUAGE,)))
    assert memory_bytes(speaking) == memory_bytes(config) + 106 * 2**20  # of the library's model


def test_only_the_shadow_gets_the_token_of_a_reference(tmp_path: Path) -> None:
    """It is no option, and appears nowhere."""
    config = load(_file(tmp_path, ""), {})
    env = {"QUANTDRIFT_DSN": "postgresql://x", "QUANTDRIFT_REFERENCE_TOKEN": "secret"}
    shadow = load_secrets(config, Role.SHADOW, env)
    assert shadow.reference_token == "secret"
    assert "secret" not in repr(shadow)
    assert load_secrets(config, Role.MONITOR, env).reference_token == ""


def test_where_a_reference_is_names_file_or_model(tmp_path: Path) -> None:
    """As it is shown, and as the record has it."""
    text = MODEL + _remote("oip-http", "http+plaintext://t:1/").replace('"m"', '"n"') + 'model = "fp32"'
    plan = explain(load(_file(tmp_path, text), {}))
    assert [set(model.references.values()) for model in plan.models] == [
        {str(tmp_path / "m.onnx")},
        {"http://t:1/fp32"},
    ]


@pytest.mark.parametrize(
    ("variable", "section"),
    [
        ("QUANTDRIFT_INTAKE_TOKEN", '[intake]\nlisten = "127.0.0.1:1"\n'),
        ("QUANTDRIFT_HMAC_KEY", '[capture]\nheaders = ["x-user"]\nhmac = ["header.x-user"]\n'),
        ("QUANTDRIFT_WEB_TOKEN", '[intake]\nlisten = "127.0.0.1:1"\n'),
    ],
)
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, variable: str, section: str) -> None:
    """Tokens and keys of a few characters; the error does not show them."""
    file = tmp_path / "config.toml"
    file.write_text(section)
    role = Role.WEB if "WEB" in variable else Role.SIDECAR
    environment = {"QUANTDRIFT_DSN": "postgresql://x"}
    with pytest.raises(OperatorError, match="fewer than 16 characters") as refused:
        load_secrets(load(file, {}), role, environment | {variable: "xyzzy"})
    assert "xyzzy" not in str(refused.value)
    load_secrets(load(file, {}), role, environment | {variable: TOKEN})


@pytest.mark.parametrize(
    ("intake", "named"),
    [
        (Intake(kserve_logger="127.0.0.1:9003"), "intake.kserve_logger"),
        (Intake(ext_proc="0.0.0.0:9002"), "intake.ext_proc at 0.0.0.0:9002"),
        (Intake(ext_proc="[::]:9002"), "intake.ext_proc at [::]:9002"),
        (Intake(ext_proc="pod.local:9002"), "intake.ext_proc at pod.local:9002"),
    ],
)
def test_an_intake_port_that_strangers_can_reach_needs_a_token(
    tmp_path: Path, intake: Intake, named: str
) -> None:
    """From the environment or a file, whose end of line is none of it; an empty file gives none."""
    config = Config(intake=intake)
    with pytest.raises(OperatorError, match=re.escape(named)) as refused:
        load_secrets(config, Role.SIDECAR, {})
    assert "set QUANTDRIFT_INTAKE_TOKEN or intake.token_file" in str(refused.value)
    assert load_secrets(config, Role.SIDECAR, {"QUANTDRIFT_INTAKE_TOKEN": TOKEN}).intake_token == TOKEN
    file = tmp_path / "token"
    told = msgspec.structs.replace(config, intake=msgspec.structs.replace(intake, token_file=str(file)))
    file.write_text(f"{TOKEN}\n")
    assert load_secrets(told, Role.SIDECAR, {}).intake_token == TOKEN
    file.write_text("\n")
    with pytest.raises(OperatorError, match=re.escape(named)):
        load_secrets(told, Role.SIDECAR, {})


@pytest.mark.parametrize("address", ["127.0.0.1:9002", "127.1.2.3:9002", "[::1]:9002", "localhost:9002"])
def test_envoy_needs_no_token_within_a_pod(address: str) -> None:
    """Nobody else reaches a loopback address."""
    assert load_secrets(Config(intake=Intake(ext_proc=address)), Role.SIDECAR, {}).intake_token == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[intake]\next_proc = "127.0.0.1:9002"\n', "can open tickets and never page"),
        (
            '[[models]]\nname = "m"\nrecheck = { url = "https://h:1", versions = ["1"] }\n',
            "QUANTDRIFT_SAMPLING_SALT",
        ),
    ],
)
def test_the_check_says_what_a_way_in_without_a_token_and_a_recheck_need(
    tmp_path: Path, text: str, words: str
) -> None:
    """Before the first ticket that should have been a page, and before rechecks count as traffic."""
    assert any(words in note for note in explain(load(_file(tmp_path, text), {})).notes)
    assert not any(words in note for note in explain(load(_file(tmp_path, ""), {})).notes)


def test_a_loggers_sink_needs_an_address_and_a_certificate_its_key(tmp_path: Path) -> None:
    """The check says which option is wrong, and what to set."""
    path = tmp_path / "config.toml"
    path.write_text("[intake]\nkserve_logger = true\n")
    with pytest.raises(OperatorError, match="kserve_logger"):
        load(path, {})
    path.write_text('[intake]\nlisten = "127.0.0.1:9001"\ncertificate_file = "tls.crt"\n')
    with pytest.raises(OperatorError, match=r"intake\.certificate_file is set and intake\.key_file is not"):
        load(path, {})
    path.write_text('[intake]\nlisten = "127.0.0.1:9001"\ncertificate_file = "a.crt"\nkey_file = "a.key"\n')
    assert load(path, {}).intake.certificate_file == str(tmp_path / "a.crt")


def test_a_mistake_in_toml_is_shown_with_its_line(tmp_path: Path) -> None:
    """And a mark below its column."""
    with pytest.raises(OperatorError) as error:
        load(_file(tmp_path, '# first\n[sidecar\nlisten = "127.0.0.1:1"\n'), {})
    *_, line, mark = str(error.value).splitlines()
    assert line == "    [sidecar"
    assert mark.index("^") == len(line)


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("QUANTDRIFT_SAMPLING_RATE", "did you mean `QUANTDRIFT__SAMPLING__RATE`"),
        ("QUANTDRIFT__SAMPLING__RAT", "no option `rat`: did you mean `rate`"),
        ("QUANTDRIFT__SAMPLIN__RATE", "no section `samplin`: did you mean `sampling`"),
    ],
)
def test_a_variable_that_sets_nothing_is_named_with_what_was_meant(
    variable: str, hint: str, tmp_path: Path
) -> None:
    """Variables of secrets, and those of others, are no mistakes."""
    path = _file(tmp_path, "")
    with pytest.raises(OperatorError, match=hint):
        load(path, {variable: "0.5"})
    load(path, {"QUANTDRIFT_DSN": "x", "QUANTDRIFT_SAMPLING_SALT": "x", "SAMPLING_RATE": "1"})


def test_an_attribute_that_is_misspelt_in_a_slice_is_recognised(tmp_path: Path) -> None:
    """Headers without regard to case; what resembles nothing that is recorded is to be added."""
    path = tmp_path / "config.toml"
    path.write_text(
        '[capture]\nheaders = ["x-region"]\n[[slices]]\nname = "a"\nheader = "X-Regoin"\n[[slices]]\nname = "b"\nheader = "user-agent"\n'
    )
    with pytest.raises(OperatorError) as refused:
        load(path, {})
    assert (
        "slices `a`: header.X-Regoin is not recorded: did you mean `x-region`? Or add it to capture.headers"
        in str(refused.value)
    )
    assert "slices `b`: header.user-agent is not recorded, add it to capture.headers" in str(refused.value)
