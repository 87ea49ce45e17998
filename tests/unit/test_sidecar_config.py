"""The configuration files of a sidecar, and which of their changes take effect while it runs."""

from pathlib import Path

import pytest

from quantdrift.core.config.load import Secrets, load
from quantdrift.core.config.parts import signature
from quantdrift.core.errors import OperatorError
from quantdrift.sidecar.state.config import FileWatch, LiveConfig, RowsError, merge, reload
from quantdrift.sidecar.state.counters import MAX_ROWS, Row

pytestmark = pytest.mark.unit


def written(directory: Path, main: str = "", **parts: str) -> Path:
    """Write a configuration with its parts; return the main file."""
    path = directory / "config.toml"
    path.write_text(main)
    (directory / "models.d").mkdir(exist_ok=True)
    for name, text in parts.items():
        (directory / "models.d" / f"{name}.toml").write_text(text)
    return path


def test_parts_add_models_and_slices_in_the_order_of_their_names(tmp_path: Path) -> None:
    """After those of the main file; a reference's path is relative to its part."""
    path = written(
        tmp_path,
        '[[models]]\nname = "m"',
        b='[[models]]\nname = "b"\ntask = "generation"\n[[models.references]]\nruntime = "transformers"\npath = "b"\n'
        '[models.references.copy]\npath = "b-int8"\nversions = ["7"]',
        a='[[models]]\nname = "a"\n[[slices]]\nname = "size"\nfeature = "size"\nedges = [1]',
    )
    (tmp_path / "models.d" / ".hidden.toml").write_text("broken")
    (tmp_path / "models.d" / "README").write_text("broken")
    config = load(path, {})
    assert [model.name for model in config.models] == ["m", "a", "b"]
    assert [rule.name for rule in config.slices] == ["size"]
    (reference,) = config.models[2].references
    assert reference.path == str(tmp_path / "models.d" / "b")
    assert reference.copy.path == str(tmp_path / "models.d" / "b-int8")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("[sampling]\nrate = 1.0", "sampling"),
        ("models = 1", "a list"),
        ("models = [", "cannot be read"),
        ('[[models]]\nname = "m"', "used 2 times"),
        ('[[models]]\nnam = "m"', "name"),
    ],
)
def test_a_part_that_is_none_is_refused(tmp_path: Path, part: str, told: str) -> None:
    """By name, and by what is wrong."""
    path = written(tmp_path, '[[models]]\nname = "m"', a=part)
    with pytest.raises(OperatorError, match=told):
        load(path, {})


def test_a_mounted_configuration_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    """A ConfigMap's files are links through a directory that is swapped; nothing is touched in place."""
    for version in ("1", "2"):
        (tmp_path / f"..{version}").mkdir()
        (tmp_path / f"..{version}" / "config.toml").write_text("")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "config.toml").symlink_to("..data/config.toml")
    before = signature(tmp_path / "config.toml")
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert signature(tmp_path / "config.toml") != before


def test_a_change_is_taken_over_when_it_rests(tmp_path: Path) -> None:
    """Half-written files are not looked at; a wrong one is told once, and the next change is looked at again."""
    path = written(tmp_path)
    settled, watch = LiveConfig.of(load(path, {})), FileWatch(path)
    assert reload(watch, settled, Secrets()) is None
    path.write_text("[sampling]\nrate = 0.5")
    assert reload(watch, settled, Secrets()) is None
    found = reload(watch, settled, Secrets())
    assert found is not None
    assert found.config.sampling.rate == 0.5
    assert reload(watch, settled, Secrets()) is None
    path.write_text("[sampling]\nrat = 0.5")
    assert reload(watch, settled, Secrets()) is None
    with pytest.raises(OperatorError, match="rate"):
        reload(watch, settled, Secrets())
    assert reload(watch, settled, Secrets()) is None
    written(tmp_path, "", a='[[models]]\nname = "new"')
    reload(watch, settled, Secrets())
    found = reload(watch, settled, Secrets())
    assert found is not None
    assert found.config.models[0].name == "new"


def test_a_hashed_attribute_without_a_key_is_not_taken_over(tmp_path: Path) -> None:
    """Secrets are read at the start alone: it would be hashed with no key."""
    path = written(tmp_path)
    settled, watch = LiveConfig.of(load(path, {})), FileWatch(path)
    path.write_text('[capture]\nheaders = ["x-user"]\nhmac = ["header.x-user"]')
    reload(watch, settled, Secrets())
    with pytest.raises(OperatorError, match="restart"):
        reload(watch, settled, Secrets())


def test_ports_stay_and_bounds_follow(tmp_path: Path) -> None:
    """What needs a restart is named."""
    before = load(written(tmp_path), {})
    after = load(
        written(
            tmp_path,
            '[sidecar]\nlisten = "0.0.0.0:1"\nmax_held_bytes = 33554432\n[stream]\nname = "other"\n'
            "[intake]\npair_window_s = 1.0",
        ),
        {},
    )
    merged, waiting = merge(before, after)
    assert merged.sidecar.listen == before.sidecar.listen
    assert merged.sidecar.max_held_bytes == 33554432
    assert merged.intake.pair_window_s == 1.0
    assert merged.stream == before.stream
    assert sorted(waiting) == ["sidecar.listen", "stream.name"]


def test_a_stratum_keeps_its_row(tmp_path: Path) -> None:
    """Whatever comes before it later, and when it has gone and comes back."""
    one = '[[sampling.header_strata]]\nname = "{}"\nrate = 1.0\nheaders = {{ x = "{}" }}\n'
    settled = LiveConfig.of(load(written(tmp_path, one.format("a", 1)), {}))
    assert settled.rows == (Row("a"), Row("default"))
    assert settled.rows_by_model == {"": (0, 1)}
    both = load(written(tmp_path, one.format("b", 2) + one.format("a", 1) + '[[models]]\nname = "m"'), {})
    settled = LiveConfig.of(both, settled.rows)
    assert settled.rows[2:] == (Row("b"), Row("b", "m"), Row("a", "m"), Row("default", "m"))
    assert settled.rows_by_model == {"": (2, 0, 1), "m": (3, 4, 5)}
    settled = LiveConfig.of(load(written(tmp_path, ""), {}), settled.rows)
    assert settled.rows_by_model == {"": (1,)}
    with pytest.raises(RowsError, match="restart"):
        LiveConfig.of(both, [Row(f"s{n}") for n in range(MAX_ROWS)])


def test_a_change_before_the_first_look_is_found(tmp_path: Path) -> None:
    """The configuration of the start was read earlier: ports and children come in between."""
    path = tmp_path / "config.toml"
    path.write_text("[sampling]\nrate = 0.5\n")
    watch = FileWatch(path)
    assert watch.poll() is None
    found = watch.poll()
    assert found is not None
    assert found.sampling.rate == 0.5
    assert watch.poll() is None


def test_an_invalid_file_is_reported_once_and_ignored(tmp_path: Path) -> None:
    """The next change is looked at again."""
    path = tmp_path / "config.toml"
    path.write_text("no [toml")
    watch = FileWatch(path)
    assert watch.poll() is None
    with pytest.raises(OperatorError):
        watch.poll()
    assert watch.poll() is None
    path.write_text("[sampling]\nrate = 0.25\n")
    assert watch.poll() is None
    assert watch.poll() is not None
