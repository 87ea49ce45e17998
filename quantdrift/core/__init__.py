"""The ground floor: what every process of quantdrift shares."""
