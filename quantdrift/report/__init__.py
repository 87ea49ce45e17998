"""The figures of a report and of a comparison of versions, and their sentences."""
