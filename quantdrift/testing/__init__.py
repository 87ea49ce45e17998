"""The tests that every plug-in must pass: classes to derive from, one module for each kind of plug-in. They need pytest and Hypothesis."""
