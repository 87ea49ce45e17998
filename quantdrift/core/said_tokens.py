"""What a candidate said token by token, beside what the FP32 model would have said: kept with an exemplar of generated text."""

import math
from typing import Final

import msgspec

from quantdrift.core.records import Exemplar

TOKENS: Final = "tokens"
"""The output of a reference in an exemplar: a `SaidTokens` as JSON for each item."""
_CLEARLY: Final = math.log(2.0)
_BEFORE: Final = 160
_AFTER: Final = 60
_PROMPT: Final = 240


class SaidTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of an answer, and the reference's choice at each of them.

    Parameters
    ----------
    served, first
        As spelt: what was served, and the reference's likeliest token there.
    served_logprob, first_logprob
        Of the reference, in nats; None where it is not known.
    """

    served: tuple[str, ...]
    first: tuple[str, ...]
    served_logprob: tuple[float | None, ...]
    first_logprob: tuple[float | None, ...]

    def divergence(self) -> int | None:
        """Return the first position at which the reference's choice is another token, more than twice as likely as the served one.

        Of a greedy answer that is where it left the reference. A sampled one has such positions also if both are equal.
        """
        for position, (said, first, p_said, p_first) in enumerate(
            zip(self.served, self.first, self.served_logprob, self.first_logprob, strict=True)
        ):
            if p_said is not None and p_first is not None and said != first and p_first - p_said > _CLEARLY:
                return position
        return None


class DivergentToken(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of an answer at which it left the reference, in its context.

    Parameters
    ----------
    exchange, item
        Which answer.
    prompt
        The end of the prompt.
    before, served, after
        The answer: the end of what came before, the token that was served, and the beginning of what followed.
    expected
        The reference's likeliest token.
    served_p, expected_p
        Their probabilities under the reference.
    position
        Of the token in the answer, from 1.
    """

    exchange: str
    item: int
    prompt: str
    before: str
    served: str
    after: str
    expected: str
    served_p: float
    expected_p: float
    position: int


def divergent_tokens(exemplar: Exemplar) -> list[DivergentToken]:
    """Return the first divergent token of each item of an exemplar that has one; none if it is not of generated text."""
    kept = next((tensor for tensor in exemplar.reference if tensor.name == TOKENS), None)
    if kept is None:
        return []
    items = _texts(kept.data)
    found = []
    for item in exemplar.items:
        if item.index >= len(items):
            continue
        said = msgspec.json.decode(items[item.index], type=SaidTokens)
        at = said.divergence()
        if at is None:
            continue
        p_served, p_first = said.served_logprob[at] or 0.0, said.first_logprob[at] or 0.0
        found.append(
            DivergentToken(
                exchange=exemplar.exchange.id,
                item=item.index,
                prompt=_prompt(exemplar)[-_PROMPT:],
                before="".join(said.served[:at])[-_BEFORE:],
                served=said.served[at],
                after="".join(said.served[at + 1 :])[:_AFTER],
                expected=said.first[at],
                served_p=math.exp(p_served),
                expected_p=math.exp(p_first),
                position=at + 1,
            )
        )
    return found


def _texts(data: bytes) -> list[bytes]:
    """Return the elements of a tensor of the type BYTES."""
    texts, at = [], 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        texts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return texts


def _prompt(exemplar: Exemplar) -> str:
    """Return the newest message of a chat, or the prompt of a completion."""
    for tensor in exemplar.exchange.inputs:
        texts = _texts(tensor.data) if tensor.datatype == "BYTES" else []
        if tensor.name == "messages" and texts:
            messages = msgspec.json.decode(texts[0])
            content = messages[-1].get("content") if messages else ""
            return content if isinstance(content, str) else ""
        if tensor.name == "prompt" and texts:
            return texts[0].decode("utf-8", "replace")
    return ""
