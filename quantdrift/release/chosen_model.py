"""The model that a call is about: its reference, its slice rules and its slices, by their names."""

from collections.abc import Sequence

import msgspec

from quantdrift.core.config.schema import Config, Model, Reference, Slice
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import ALL, SliceAssigner, SliceKey, attribute_key


def model_named(config: Config, name: str) -> Model:
    """Return a model of the configuration by its name; empty: the only one."""
    if not name:
        if len(config.models) != 1:
            raise OperatorError(f"the configuration has {len(config.models)} models: choose one with --model")
        return config.models[0]
    for model in config.models:
        if model.name == name:
            return model
    names = ", ".join(f"`{model.name}`" for model in config.models) or "none"
    raise OperatorError(f"there is no model `{name}` in the configuration; known are: {names}")


def chosen_reference(model: Model, number: int | None) -> tuple[int, Reference]:
    """Return a reference of a model with its number, from 1; without a number the only one."""
    chosen = number or 1
    if chosen > len(model.references) or (number is None and len(model.references) > 1):
        raise OperatorError(
            f"model `{model.name}` has {len(model.references)} references: choose one with --reference"
        )
    return chosen, model.references[chosen - 1]


def rules_of(config: Config, model: Model) -> list[Slice]:
    """Return the slice rules of a model."""
    return [rule for rule in config.slices if rule.model in ("", model.name)]


def rules_named(
    config: Config, model: Model, chosen: Sequence[str], *, kinds: Sequence[str] = ()
) -> list[Slice]:
    """Return the slice rules of a model that `--slice` names; without a name all of them.

    Parameters
    ----------
    chosen
        Names of rules, or `all`.
    kinds
        What learned and discovered slices are called, where the command knows them.
    """
    rules = rules_of(config, model)
    if not chosen:
        return rules
    named_rules = {rule.name: rule for rule in rules}
    if unknown := [name for name in chosen if name not in {ALL, *named_rules}]:
        named = unknown[0].partition("=")[0]
        if named in named_rules:
            raise OperatorError(
                f"--slice {unknown[0]}: give the name of the rule, --slice {named}, which judges all of its slices"
            )
        found = f", and learned and discovered slices are called {_listed(kinds)}" if kinds else ""
        raise OperatorError(
            f"--slice {unknown[0]}: model `{model.name}` has no such rule in [[slices]]; it has {_listed([ALL, *named_rules])}{found}"
        )
    kept = [rule for name, rule in named_rules.items() if name in chosen]
    for rule in kept:
        if absent := [part for part in rule.cross if part not in chosen]:
            raise OperatorError(f"--slice {rule.name} is a cross: give --slice {absent[0]}, too")
    return kept


def slices_named(config: Config, model: Model, rules: Sequence[Slice], name: str) -> list[SliceKey]:
    """Return the declared slices of the rules, and that of the value in `name` for a rule without declared values."""
    assigner = SliceAssigner(msgspec.structs.replace(config, slices=tuple(rules)), model.name)
    of, _, value = name.partition("=")
    attributes = {
        attribute_key(rule): value for rule in rules if rule.name == of and not (rule.feature or rule.cross)
    }
    return list(dict.fromkeys([*assigner.declared(), *assigner.assign(attributes, {})]))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
