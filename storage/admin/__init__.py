"""Administration of the database: migrations, retention, the generated documentation."""
