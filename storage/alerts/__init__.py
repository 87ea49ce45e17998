"""Alerts: what people do about them, the evidence and examples that go with them, and the events that wait to be sent."""
