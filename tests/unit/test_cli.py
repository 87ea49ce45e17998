"""The command line, as far as no server is needed."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from quantdrift.cli.main import main


def _run(*arguments: str, dsn: str = "") -> Result:
    return CliRunner().invoke(main, list(arguments), env={"QUANTDRIFT_DSN": dsn, "QUANTDRIFT_DATA": ""})


def _commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))


COMMANDS = dict(_commands(main))


@pytest.mark.unit
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_and_option_explains_itself(path: tuple[str, ...]) -> None:
    """Help is there for all, and what starts a process or writes shows an example."""
    result = _run(*path, "--help")
    assert result.exit_code == 0
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{' '.join(path)} {parameter.opts}"
    if path in {
        ("sidecar",),
        ("shadow",),
        ("monitor",),
        ("up",),
        ("report",),
        ("db", "upgrade"),
        ("config", "check"),
        ("baseline", "accept"),
        ("baseline", "freeze"),
        ("baseline", "keep"),
        ("baseline", "import"),
        ("slices", "fit"),
        ("slices", "search"),
        ("plan",),
        ("backtest",),
        ("triage",),
    }:
        assert "Example" in result.output


@pytest.mark.unit
def test_a_wrong_configuration_ends_with_2_and_says_what_to_do(tmp_path: Path) -> None:
    """No traceback: a sentence for the person who must act."""
    path = tmp_path / "config.toml"
    path.write_text("[sidecar]\nworkerz = 1")
    result = _run("config", "check", "--config", str(path))
    assert result.exit_code == 2
    assert "did you mean `workers`" in result.output
    assert "Traceback" not in result.output


@pytest.mark.integration
def test_config_check_says_what_it_would_do(tmp_path: Path) -> None:
    """As text for people, as JSON for machines; a reference that is not here is an error, and a note where none is needed."""
    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname = "m"\n[[models.references]]\npath = "gone.onnx"')
    check = ("config", "check", "--config", str(path))
    said = "gone.onnx of model `m` does not exist here (the shadow needs it)\n"
    text = _run(*check, "--no-references", "--requests-per-s", "100")
    assert text.exit_code == 0
    assert "expected replays: 1.0/s" in text.output
    assert said in text.output
    for options in ((), ("--references",)):
        refused = _run(*check, *options)
        assert refused.exit_code == 2
        assert refused.output.count("gone.onnx") == 1
        assert said in refused.output
        assert refused.output.endswith("the host of a sidecar alone: --no-references\n")
    (tmp_path / "gone-1.onnx").touch()
    alike = _run(*check)
    assert "(the shadow needs it): did you mean `gone-1.onnx`?" in alike.output
    record = json.loads(_run(*check, "--no-references", "--json").output)
    assert record["models"][0]["slices"] == ["all"]
    assert record["memory_bytes"] == 2**28


@pytest.mark.integration
def test_config_check_lists_which_connections_are_encrypted(tmp_path: Path) -> None:
    """Addresses in files that are here belong to them; an address that is not allowed ends the check with 2."""
    path, file = tmp_path / "config.toml", tmp_path / "nats.url"
    path.write_text(
        '[stream]\nurl_file = "nats.url"\nca_file = "/tls/ca.pem"\n'
        '[telemetry]\notlp_endpoint = "http+plaintext://collector:4317"\n'
    )
    file.write_text("tls://u:hunter2@nats.example:4222\n")
    dsn = "postgresql://u:hunter2@db.example/q"
    said = _run("config", "check", "--config", str(path), dsn=f"{dsn}?sslmode=require")
    assert said.exit_code == 0
    for line in (
        "  NATS tls://nats.example:4222: encrypted, server verified by /tls/ca.pem\n",
        "  telemetry.otlp_endpoint http+plaintext://collector:4317: PLAINTEXT over a network, as the address says\n",
        "  Postgres db.example:5432: encrypted, server NOT VERIFIED: sslmode=require names no sslrootcert\n",
    ):
        assert line in said.output
    assert "hunter2" not in said.output
    record = json.loads(_run("config", "check", "--config", str(path), "--json").output)
    assert record["connections"][0]["to"] == "NATS tls://nats.example:4222"
    file.unlink()
    note = "nats.url does not exist here: the connection to NATS is not checked"
    without = _run("config", "check", "--config", str(path))
    assert note in without.output
    assert "  NATS " not in without.output
    refused = _run("config", "check", "--config", str(path), dsn=dsn)
    assert refused.exit_code == 2
    assert "the Postgres address has no sslmode, and db.example:5432 is not this machine" in refused.output
    assert "hunter2" not in refused.output


@pytest.mark.integration
def test_config_check_notes_that_nothing_listens_at_the_backend(tmp_path: Path) -> None:
    """It may come later, so it is no error; another machine is not asked."""
    path = tmp_path / "config.toml"
    note = "nothing accepts connections at localhost:{} on this machine now (sidecar.backend)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        path.write_text(f'[sidecar]\nlisten = "127.0.0.1:0"\nbackend = "localhost:{port}"')
        assert "nothing accepts" not in _run("config", "check", "--config", str(path)).output
    text = _run("config", "check", "--config", str(path))
    assert text.exit_code == 0
    assert note.format(port) in text.output
    path.write_text('[sidecar]\nbackend = "no-such-host.invalid:8001"')
    assert "nothing accepts" not in _run("config", "check", "--config", str(path)).output


@pytest.mark.release
@pytest.mark.integration
def test_config_check_opens_a_reference_in_pytorch(tmp_path: Path) -> None:
    """It tells precision and digest; an exported program that is not pinned is refused with what to pin."""
    from tests.support.shadow.torch_models import exported, pin

    program = exported(tmp_path / "m.pt2")
    path = tmp_path / "config.toml"
    text = f'[[models]]\nname = "m"\n[[models.references]]\nruntime = "torch"\npath = "{program.name}"\n'
    path.write_text(text)
    refused = _run("config", "check", "--config", str(path), "--references")
    assert refused.exit_code == 2
    assert pin(program) in refused.output
    path.write_text(f'{text}digest = "{pin(program)}"\n')
    checked = _run("config", "check", "--config", str(path), "--references")
    assert checked.exit_code == 0
    assert f"float32, sha256 {pin(program).removeprefix('sha256:')}" in checked.output


@pytest.mark.integration
def test_a_long_name_of_a_stratum_breaks_no_column(tmp_path: Path) -> None:
    """Columns are as wide as what stands in them."""
    path = tmp_path / "config.toml"
    name = "a name of more than eighteen characters"
    path.write_text(
        '[capture]\nheaders = ["x"]\n[[sampling.header_strata]]\n'
        f'name = "{name}"\nrate = 0.5\nheaders = {{ x = "y" }}\n'
    )
    lines = _run("config", "check", "--config", str(path)).output.splitlines()
    head = next(line for line in lines if line.startswith("header stratum"))
    for line in (one for one in lines if one.startswith((name, "default"))):
        assert line[head.index("taken") - 1] == " " != line[head.index("taken")]
        assert line[head.index("replayed") - 1] == " " != line[head.index("replayed")]


@pytest.mark.unit
def test_config_show_prints_what_is_in_force(tmp_path: Path) -> None:
    """Overrides included."""
    path = tmp_path / "config.toml"
    path.write_text("[sampling]\nrate = 0.25")
    shown = json.loads(_run("config", "show", "--config", str(path)).output)
    assert shown["sampling"]["rate"] == 0.25


@pytest.mark.unit
def test_a_role_without_its_secret_says_which(tmp_path: Path) -> None:
    """The monitor needs the database; the message names the variable."""
    path = tmp_path / "config.toml"
    path.write_text("")
    result = _run("monitor", "--config", str(path))
    assert result.exit_code == 2
    assert "QUANTDRIFT_DSN" in result.output
    assert "start `quantdrift up" in _run("monitor", "--config", str(path), "--data", str(tmp_path)).output


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str) -> None:
    """For the shells that people use."""
    assert "_QUANTDRIFT_COMPLETE" in _run("completion", shell).output


@pytest.mark.integration
def test_the_command_line_loads_only_what_a_role_needs() -> None:
    """Starting any command costs no torch, onnxruntime, SciPy or SQLAlchemy, nor aiohttp, which the NATS library imports."""
    code = "import sys, quantdrift.cli.main, sidecar.supervisor; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"torch", "onnxruntime", "onnx", "scipy", "sqlalchemy", "alembic", "asyncpg", "grpc", "numba"}
    heavy |= {"nats", "aiohttp"}
    assert not heavy & {name.split(".")[0] for name in modules}


@pytest.mark.integration
def test_a_role_whose_packages_are_missing_names_what_to_install(tmp_path: Path) -> None:
    """The base install is the sidecar's; each other role says which extra it needs."""
    (tmp_path / "config.toml").write_text("")
    for command, module, extra in (("shadow", "onnx", "shadow"), ("monitor", "sqlalchemy", "monitor")):
        code = f"import sys; sys.modules[{module!r}] = None; from quantdrift.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert f"pip install 'quantdrift[{extra}]'" in done.stderr


@pytest.mark.unit
def test_an_unknown_command_is_refused_with_the_nearest_one() -> None:
    """As subcommands are."""
    done = CliRunner().invoke(main, ["stauts"])
    assert done.exit_code == 2
    assert "No such command 'stauts'. Did you mean 'status'?" in done.output
    assert CliRunner().invoke(main, ["zzzzzz"]).output.endswith("No such command 'zzzzzz'.\n")
