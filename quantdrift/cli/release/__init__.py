"""Commands around a release: judge a candidate, find the cause of damage, repair it."""
