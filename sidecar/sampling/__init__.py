"""The two sampling phases, and the switch that turns capture off."""
