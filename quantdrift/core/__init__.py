"""Records, configuration, the stream client and process tools that every process of quantdrift uses."""
