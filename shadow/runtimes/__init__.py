"""Reference runtimes: one protocol, a registry, and what all of them share."""
