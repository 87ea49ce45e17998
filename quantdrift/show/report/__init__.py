"""The report: the figures of a period as one HTML file, as Markdown and as JSON."""
