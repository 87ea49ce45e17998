"""What `quantdrift init` finds out of files, a server and traffic, and the configuration that follows from it."""
