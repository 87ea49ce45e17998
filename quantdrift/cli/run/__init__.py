"""Commands that run processes, and the servers that `up` embeds."""
