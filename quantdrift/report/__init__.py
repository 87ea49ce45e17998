"""The weekly report: figures, findings, text, charts and the HTML page."""
