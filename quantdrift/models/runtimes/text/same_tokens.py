"""The check that the candidate's server makes the same tokens as the reference, of a dozen texts and of a chat, before anything is compared.

vLLM and llama.cpp have `/tokenize`, which leaves out what it does not know of a question. A server without it is not checked. The chat is asked of
servers that tokenise `messages`, as vLLM does.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from quantdrift.models.language.scoring import ScoringRequest
from quantdrift.models.runtimes.text.scoring_runtime import LanguageModel

TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    "Größe, Maß und Öl: 3,5 km/h!",
    "¿Dónde está la biblioteca? À bientôt, l'été.",
    "Быстрая коричневая лиса",
    "敏捷的棕色狐狸跳过了懒狗。",
    "素早い茶色の狐、カタカナ",
    "الثعلب البني السريع",
    "def f(x):\n    return {'a': [1, 2.50], \"b\": x**2}\n",
    "  two  spaces\tand\ttabs \n\n\n",
    '{"name": "weather", "arguments": {"city": "Ulm"}}',
    "1234567890 0x7f 1e-5 $99.99",
    "😀👩‍💻 naïve café",
)
_CHAT: Final = ({"role": "user", "content": "Say one word."},)
_TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 1 << 20

Ask = Callable[[Mapping[str, Any]], tuple[int, ...] | None]
"""Returns the tokens of a question to `/tokenize`; None: the server does not say."""


def tokenize_at(address: str, model: str) -> Ask:
    """Return what asks the candidate's server.

    Parameters
    ----------
    address
        HOST:PORT, as in `sidecar.backend`.
    model
        The model's name in requests.
    """

    def ask(question: Mapping[str, Any]) -> tuple[int, ...] | None:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            body = json.dumps({"model": model, **question})
            connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            tokens = json.loads(answer.read(_MOST_BYTES))["tokens"] if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None
        finally:
            connection.close()
        if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
            return None
        return tuple(tokens)

    return ask


def other_tokens(reference: LanguageModel, ask: Ask) -> str:
    """Return what reference and candidate tokenise differently, as a clause; empty: nothing, or the server does not say.

    Raises
    ------
    QuarantineError
        The reference has no chat template.
    RetryError
        Its server is unreachable.
    """
    for text in TEXTS:
        of_candidate = ask(
            {"prompt": text, "content": text, "add_special_tokens": False, "add_special": False}
        )
        if not of_candidate:
            return ""
        of_reference = reference.text_ids(text, add_special_tokens=False)
        if of_reference != of_candidate:
            return f"{_both(repr(text), of_candidate, of_reference)}: their tokenizers differ"
    of_candidate = ask({"messages": _CHAT, "add_generation_prompt": True})
    if not of_candidate:  # llama.cpp answers with no token
        return ""
    of_reference = reference.chat_ids(ScoringRequest(messages=_CHAT))
    if of_reference == of_candidate:
        return ""
    return f"{_both('a chat of one message', of_candidate, of_reference)}: their chat templates differ"


def _both(what: str, of_candidate: tuple[int, ...], of_reference: tuple[int, ...]) -> str:
    return (
        f"the candidate's server makes {len(of_candidate)} tokens of {what}, {_begin(of_candidate)}, and the reference"
        f" {len(of_reference)}, {_begin(of_reference)}"
    )


def _begin(ids: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, ids[:4]))}{', ...' if len(ids) > 4 else ''}]"
