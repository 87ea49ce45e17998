"""The reference runtimes: their protocol, the registry, and what all runtimes share."""
