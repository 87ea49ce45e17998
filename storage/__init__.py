"""Postgres is the record: tables, writer, queries, and the embedded server."""
