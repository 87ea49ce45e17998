"""The database (Postgres): tables, writers, queries, administration, and the embedded server."""
