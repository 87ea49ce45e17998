"""Commands that show what was found."""
