"""The fold: stored batches in order become detector state, verdicts, alerts and roll-ups."""
