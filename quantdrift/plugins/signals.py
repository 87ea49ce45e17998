"""What the signal of a plug-in is made of; see docs/how-to/plugins.md. Its values come from the comparator of a task."""

from quantdrift.core.signals import SignalPlugin

__all__ = ["SignalPlugin"]
