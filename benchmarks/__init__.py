"""Benchmarks: each compares with a bare limit in the same run and ends with one line of JSON."""
