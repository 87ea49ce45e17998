"""The pipeline from the stream to the database: read, validate, batch, replay, assess, store, acknowledge."""
