"""Two versions of a model beside each other, slice by slice."""

import shlex
from functools import partial
from typing import Final

from aiohttp import web

from quantdrift.core.errors import OperatorError
from quantdrift.report.compare import compare as compare_versions
from quantdrift.show.page.rendering import render
from quantdrift.show.page.request import CONFIG, DATABASE, query_number, query_text
from quantdrift.storage.snapshot import in_time, reading
from quantdrift.storage.versions import VersionNow, versions_now

_MOST_COMPARED: Final = 300_000
"""Answers of a version that are read one by one while a person waits; of more, the roll-ups are."""
_COMPARING_S: Final = 5.0


async def compare(request: web.Request) -> web.Response:
    """Show two versions of a model, slice by slice, as `quantdrift compare` does."""
    model = query_text(request, "model")
    new_id, old_id = query_number(request, "new"), query_number(request, "old")
    comparison, problem = None, ""
    async with reading(request.app[DATABASE]) as connection:
        by_model: dict[str, list[VersionNow]] = {}
        for version in await versions_now(connection):
            by_model.setdefault(version.model, []).append(version)
        models = list(by_model)
        if model not in by_model:
            model = next((name for name in models if len(by_model[name]) > 1), models[0] if models else "")
        versions = by_model.get(model, [])
        new = next((version for version in versions if version.id == new_id), next(iter(versions), None))
        rest = [version for version in versions if new is not None and version.id != new.id]
        old = next((version for version in rest if version.id == old_id), next(iter(rest), None))
        if new and old:
            read = partial(
                compare_versions,
                connection,
                request.app[CONFIG],
                old=old.version,
                new=new.version,
                model=model,
            )
            try:
                comparison = await in_time(
                    connection, partial(read, most=_MOST_COMPARED), _COMPARING_S
                ) or await in_time(connection, partial(read, most=0), _COMPARING_S)
            except OperatorError as error:
                problem = str(error)
    return render(
        request,
        "compare.html",
        models=models,
        model=model,
        versions=versions,
        old=old,
        new=new,
        comparison=comparison,
        problem=problem,
        command=shlex.join(
            ["quantdrift", "compare", "--model", model, "--from", old.version, "--to", new.version]
        )
        if new and old
        else "",
    )
