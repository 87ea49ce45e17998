"""Alerts as messages of chats, checked against what Slack and Teams document of their forms."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from quantdrift.core.config.connections import connection_problems
from quantdrift.core.config.schema import Config, Notify, Web
from quantdrift.core.config.watching import WebhookFormat
from quantdrift.facts.words.text import AlertText, Line, Step
from quantdrift.monitor.notify.webhook import message
from quantdrift.storage.alerts.alerts import AlertDelivery, AlertFact

pytestmark = pytest.mark.unit

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVIL = "<https://evil.example|Click to ack> [ack](https://evil.example) @here"
WORDS = AlertText(
    headline=f"digits int8-7: at least 3.1 % of answers in {EVIL} changed (budget: 1 %).",
    lines=(
        Line(label="How many", text="5.3 % of 395 answers when it paged."),
        Line(label="Confidence", text="almost certain, this is not chance."),
        Line(label="Since", text="about 2026-03-01 12:00 UTC (estimated)."),
        Line(label="What changed", text="the model answers worse on inputs that are as hard as before."),
    ),
    do_now=(Step(text="Route scanner=faint to the FP32 model."), Step(text="Say that you look into it.")),
)


def _plain(most: int) -> dict[str, Any]:
    """Return the schema of a plain text."""
    return {
        "type": "object",
        "properties": {
            "type": {"const": "plain_text"},
            "text": {"type": "string", "minLength": 1, "maxLength": most},
            "emoji": {"type": "boolean"},
        },
        "required": ["type", "text"],
        "additionalProperties": False,
    }


# https://docs.slack.dev/reference/block-kit/blocks: header, section and actions with buttons.
SLACK = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 40_000},
        "blocks": {
            "type": "array",
            "maxItems": 50,
            "items": {
                "oneOf": [
                    {
                        "properties": {
                            "type": {"const": "header"},
                            "text": _plain(150),
                        },
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                    {
                        "properties": {"type": {"const": "section"}, "text": _plain(3000)},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                    {
                        "properties": {
                            "type": {"const": "actions"},
                            "elements": {
                                "type": "array",
                                "maxItems": 25,
                                "items": {
                                    "properties": {
                                        "type": {"const": "button"},
                                        "text": _plain(3000),
                                        "url": {"type": "string", "maxLength": 3000, "pattern": "^https://"},
                                    },
                                    "required": ["type", "text"],
                                    "additionalProperties": False,
                                },
                            },
                        },
                        "required": ["type", "elements"],
                        "additionalProperties": False,
                    },
                ]
            },
        },
    },
    "required": ["text", "blocks"],
    "additionalProperties": False,
}
# A message of Workflows with one card; https://adaptivecards.io/schemas/adaptive-card.json for what is in it.
TEAMS = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "attachments": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "properties": {
                    "contentType": {"const": "application/vnd.microsoft.card.adaptive"},
                    "contentUrl": {"type": "null"},
                    "content": {
                        "properties": {
                            "$schema": {"const": "http://adaptivecards.io/schemas/adaptive-card.json"},
                            "type": {"const": "AdaptiveCard"},
                            "version": {"const": "1.4"},
                            "body": {
                                "type": "array",
                                "items": {
                                    "oneOf": [
                                        {
                                            "properties": {
                                                "type": {"const": "TextBlock"},
                                                "text": {"type": "string"},
                                                "weight": {"enum": ["Default", "Lighter", "Bolder"]},
                                                "size": {"enum": ["Default", "Small", "Medium", "Large"]},
                                                "wrap": {"type": "boolean"},
                                            },
                                            "required": ["type", "text"],
                                            "additionalProperties": False,
                                        },
                                        {
                                            "properties": {
                                                "type": {"const": "FactSet"},
                                                "facts": {
                                                    "type": "array",
                                                    "items": {
                                                        "properties": {
                                                            "title": {"type": "string"},
                                                            "value": {"type": "string"},
                                                        },
                                                        "required": ["title", "value"],
                                                        "additionalProperties": False,
                                                    },
                                                },
                                            },
                                            "required": ["type", "facts"],
                                            "additionalProperties": False,
                                        },
                                    ]
                                },
                            },
                            "actions": {
                                "type": "array",
                                "items": {
                                    "properties": {
                                        "type": {"const": "Action.OpenUrl"},
                                        "title": {"type": "string"},
                                        "url": {"type": "string", "pattern": "^https://"},
                                    },
                                    "required": ["type", "url"],
                                    "additionalProperties": False,
                                },
                            },
                        },
                        "required": ["type", "version", "body"],
                        "additionalProperties": False,
                    },
                },
                "required": ["contentType", "content"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["type", "attachments"],
    "additionalProperties": False,
}
SCHEMAS = {WebhookFormat.SLACK: SLACK, WebhookFormat.TEAMS: TEAMS}


def _delivery(change: str = "opened", text: AlertText = WORDS, **alert: Any) -> AlertDelivery:
    fact = AlertFact(
        id=12,
        version_id=1,
        model="digits",
        version="int8-7",
        slice="scanner=faint",
        slice_id=2,
        severity="firing",
        metric="flip",
        onset_at=AT,
        opened_at=AT,
        written_at=AT,
        resolved_at=None,
        details={},
        text=WORDS,
        acknowledged=None,
        escalations=0,
    )
    alert_then = msgspec.structs.replace(fact, **alert)
    return AlertDelivery(id=1, attempts=0, change=change, at=AT, alert=alert_then, details={}, text=text)


def _sent(
    kind: WebhookFormat, delivery: AlertDelivery, url: str = "https://drift.example", why: str = ""
) -> tuple[Any, str]:
    """Return a message that fits the schema of its chat, and its text."""
    import jsonschema  # 3 s of processor time

    sent = json.loads(message(kind, delivery, Config(web=Web(url=url)), mitigated=why))
    jsonschema.validate(sent, SCHEMAS[kind])
    return sent, json.dumps(sent, ensure_ascii=False)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_message_has_headline_facts_first_step_and_an_absolute_link(kind: WebhookFormat) -> None:
    """In this order; the statistics stay away."""
    _, text = _sent(kind, _delivery())
    order = (
        "at least 3.1 %",
        "5.3 % of 395",
        "about 2026-03-01 12:00",
        "inputs that are as hard",
        "Route scanner=faint",
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "https://drift.example/alert/12" in text
    assert "almost certain" not in text


@pytest.mark.parametrize("kind", SCHEMAS)
def test_without_an_address_there_is_the_command_and_no_link(kind: WebhookFormat) -> None:
    """Nothing relative that nobody can open."""
    sent, text = _sent(kind, _delivery(), url="")
    assert "quantdrift alerts show 12" in text
    assert "alert/12" not in text
    blocks = sent.get("blocks", [])
    assert not [block for block in blocks if block["type"] == "actions"]


def test_values_of_clients_become_no_markup() -> None:
    """Slack gets plain text, which has none; its fallback and Teams get the signs replaced."""
    sent, _ = _sent(WebhookFormat.SLACK, _delivery())
    assert "<http" not in sent["text"]
    _, teams = _sent(WebhookFormat.TEAMS, _delivery())
    assert "](http" not in teams
    assert "<http" not in teams


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_long_headline_is_whole_somewhere(kind: WebhookFormat) -> None:
    """Slack's header takes 150 characters."""
    name = "scanner=" + "x" * 300
    _, text = _sent(kind, _delivery(text=msgspec.structs.replace(WORDS, headline=f"{name} changed.")))
    assert f"{name} changed." in text


@pytest.mark.parametrize("kind", SCHEMAS)
def test_what_is_over_or_mitigated_asks_for_nothing(kind: WebhookFormat) -> None:
    """The headline says so."""
    over = msgspec.structs.replace(
        WORDS, headline="digits int8-7: over in scanner=faint.", lines=(), do_now=()
    )
    _, text = _sent(kind, _delivery("ended", over, resolved_at=AT))
    assert "over in scanner=faint" in text
    assert "Do now" not in text
    _, text = _sent(kind, _delivery("mitigated"), why="digits int8-7, scanner=faint: routed to FP32.")
    assert "Mitigated: digits int8-7, scanner=faint: routed to FP32." in text
    assert "Do now" not in text
    _, text = _sent(kind, _delivery("escalated"))
    assert "Now a page: digits" in text


def test_a_chat_needs_no_key() -> None:
    """A program does."""
    notify = Notify(webhook_url="https://hooks.slack.com/services/x", webhook_format=WebhookFormat.SLACK)
    assert not list(connection_problems(Config(notify=notify)))
