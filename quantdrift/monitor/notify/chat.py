"""Changes of an alert as messages of chats: one headline, the lines for whoever is woken, what to do first, and a way to the alert.

Values of clients stand in plain text, or with the signs replaced that would begin a link, a mention or a tag. Every address is an absolute one
below `web.url`; without it there is the command in place of the button.
"""

from typing import Any, Final

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.config.watching import WebhookFormat
from quantdrift.core.links import alert_page
from quantdrift.core.text import plain, unmarked
from quantdrift.facts.words.happened import SINCE
from quantdrift.facts.words.text import AlertText
from quantdrift.storage.alerts.alerts import Delivery

_MOST_HEADER: Final = 150  # characters, Slack's limit
_MOST_LINE: Final = 2000
_FACTS: Final = ("How many", SINCE, "What changed")
_OPEN: Final = "Open the alert"
_CHANGES: Final = {
    "opened": "",
    "escalated": "Now a page: ",
    "worse": "Worse than when it was acknowledged: ",
    "ended": "",
    "mitigated": "Mitigated: ",
    "reopened": "Open again: ",
}


def message(kind: WebhookFormat, delivery: Delivery, config: Config, *, mitigated: str = "") -> bytes:
    """Return the body that the webhook of a chat takes.

    Parameters
    ----------
    kind
        Slack or Teams.
    mitigated
        Why nobody gets the answers of an alert that lasts; empty: they do.
    """
    words = delivery.text or delivery.alert.words
    headline = plain(f"{_CHANGES.get(delivery.change, '')}{mitigated or words.headline}")
    lines = [(label, plain(words.answer(label))) for label in _FACTS if words.answer(label)]
    lines += _first(words) if delivery.alert.is_open and not mitigated else []
    page = alert_page(config, delivery.alert.id)
    if not page:
        lines.append(("Look", f"quantdrift alerts show {delivery.alert.id}"))
    built = _slack(headline, lines, page) if kind is WebhookFormat.SLACK else _teams(headline, lines, page)
    return msgspec.json.encode(built)


def _first(words: AlertText) -> list[tuple[str, str]]:
    """Return what to do first."""
    return [("Do now", plain(str(words.do_now[0])))] if words.do_now else []


def _slack(headline: str, lines: list[tuple[str, str]], page: str) -> dict[str, Any]:
    """Return a message of Slack's Block Kit, in plain text: there is no markup in it."""
    blocks: list[dict[str, Any]] = [{"type": "header", "text": _text(headline, _MOST_HEADER)}]
    if len(headline) > _MOST_HEADER:
        blocks.append({"type": "section", "text": _text(headline, _MOST_LINE)})
    blocks += [{"type": "section", "text": _text(f"{label}: {text}", _MOST_LINE)} for label, text in lines]
    if page:
        button = {"type": "button", "text": _text(_OPEN, _MOST_HEADER), "url": page}
        blocks.append({"type": "actions", "elements": [button]})
    return {"text": unmarked(headline), "blocks": blocks}


def _text(text: str, most: int) -> dict[str, Any]:
    return {
        "type": "plain_text",
        "text": text if len(text) <= most else f"{text[: most - 1]}…",
        "emoji": False,
    }


def _teams(headline: str, lines: list[tuple[str, str]], page: str) -> dict[str, Any]:
    """Return a message with an Adaptive Card, whose texts may have Markdown."""
    head = {
        "type": "TextBlock",
        "text": unmarked(headline),
        "weight": "Bolder",
        "size": "Medium",
        "wrap": True,
    }
    facts = [{"title": label, "value": unmarked(text[:_MOST_LINE])} for label, text in lines]
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [head, {"type": "FactSet", "facts": facts}],
    }
    if page:
        card["actions"] = [{"type": "Action.OpenUrl", "title": _OPEN, "url": page}]
    return {
        "type": "message",
        "attachments": [
            {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
        ],
    }
