"""What a notebook, a script and the commands ask about a release: each a function with a result record."""
