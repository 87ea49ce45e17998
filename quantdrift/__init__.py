"""quantdrift: finds the input slice on which a quantised model has silently gone bad."""
