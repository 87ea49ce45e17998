"""Options of a copy of the candidate, which scores answers that came without log-probabilities."""

from typing import Annotated

from msgspec import Meta

from quantdrift.core.config.address import without_mark
from quantdrift.core.config.section import Section, about


class CandidateCopy(Section, frozen=True, kw_only=True):
    """A copy of the candidate without traffic of its own. It scores answers that came without log-probabilities. For text."""

    url: Annotated[
        str,
        about(
            "Address of the copy, as `models.references.url`, of an OpenAI-compatible server. "
            "Prompts and answers are sent there. Empty: see `path`."
        ),
        Meta(pattern=r"^(|(https|http(\+plaintext)?)://[^/?#@\s]+(/[^?#\s]*)?)$"),
    ] = ""
    path: Annotated[
        str,
        about(
            "Instead of `url`: the folder from `save_pretrained`. It may be quantised. Both empty: no copy."
        ),
    ] = ""
    versions: Annotated[
        tuple[str, ...],
        about(
            "Candidate versions that it is a copy of, with shell wildcards. Scores of any other "
            "version would be false."
        ),
    ] = ()
    precision: Annotated[
        str,
        about("What it computes in, in your words, e.g. `int8`: recorded, not checked. Empty: `unverified`."),
    ] = ""
    digest: Annotated[
        str,
        about("`sha256:...`: refuse any other folder. For a server it is recorded only."),
        Meta(pattern=r"^(|sha256:[0-9a-f]{64})$"),
    ] = ""
    model: Annotated[str, about("Its name at that server. Empty: as models.name.")] = ""
    token_file: Annotated[
        str, about("File with a bearer token for that server, read again for each request. Empty: none.")
    ] = ""

    @property
    def is_configured(self) -> bool:
        """Whether a copy is configured."""
        return bool(self.url or self.path)

    def where(self, model: str) -> str:
        """Return where the copy of `model` is: a folder, or a model at a server."""
        return self.path or (
            f"{without_mark(self.url).rstrip('/')}/{self.model or model}" if self.url else ""
        )
