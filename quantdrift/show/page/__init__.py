"""The live page: a server that reads Postgres and shows models, slices, alerts, releases and the system itself."""
