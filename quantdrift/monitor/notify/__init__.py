"""Notifications of alerts without Prometheus: to Alertmanager, as a state, and to a webhook, as events."""
