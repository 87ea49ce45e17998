"""Questions before and after: expected delays, and stored history under another policy."""
