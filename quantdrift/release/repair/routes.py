"""Routes for the proxies of a mesh: requests of a slice go to another server."""

import json
from collections.abc import Sequence
from typing import Final

from quantdrift.core.records import Predicate
from quantdrift.core.slices import SliceKey

_HEADER: Final = "header."
_TEXT: Final = """\
# Requests of the slice {slice} go to {service}, and all others where they go today.
# {service} is a name for you to choose: the server of the repaired model.

# Istio: the first rule under `http` of the VirtualService of model {model}.
- match:
    - headers:
{istio}
  route:
    - destination: {{host: {service}}}
---
# Envoy: the first entry under `routes` of the virtual host of model {model}.
- match:
    prefix: "/"
    headers:
{envoy}
  route: {{cluster: {service}}}
"""


def route_of(key: SliceKey, service: str) -> str | None:
    """Return a route for Istio and one for Envoy, as YAML; None: the slice is not made of headers with one value each."""
    if not key.where or not all(_is_header(condition) for condition in key.where):
        return None
    return _TEXT.format(
        slice=key.name.replace("\n", " "),
        service=service,
        model=key.model,
        istio="\n".join(f"        {name}: {{exact: {value}}}" for name, value in _quoted(key.where)),
        envoy="\n".join(
            f"      - {{name: {name}, string_match: {{exact: {value}}}}}"
            for name, value in _quoted(key.where)
        ),
    )


def _is_header(condition: Predicate) -> bool:
    return condition.key.startswith(_HEADER) and condition.equals is not None


def _quoted(conditions: Sequence[Predicate]) -> list[tuple[str, str]]:
    """Return the name and the value of each header as texts of YAML: it reads those of JSON."""
    return [
        (json.dumps(condition.key.removeprefix(_HEADER)), json.dumps(condition.equals))
        for condition in conditions
    ]
