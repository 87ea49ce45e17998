"""Looking after the database: migrations, retention, the generated documentation."""
