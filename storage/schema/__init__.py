"""The tables, roles and partitions."""
