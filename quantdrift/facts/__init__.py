"""Facts: what is known of a model, made in one place for every surface. No I/O."""
