"""Why an alert fired: the exchanges around its onset, other measures, related alerts."""
