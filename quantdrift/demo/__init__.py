"""The demo: a quantised digit reader that goes bad on one scanner's pages while its average stays fine."""
