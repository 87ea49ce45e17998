"""What people look at, drawn from the figures: the live page, the report, and the plots of both."""
