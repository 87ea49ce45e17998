"""Commands for whoever operates quantdrift: configuration, database, keys, audit, privacy."""
