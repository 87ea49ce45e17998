"""The report's reads, and the record of each written report."""
