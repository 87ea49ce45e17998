"""The sampling policy: the demand of each slice, the lag of the shadow, and the publication of the rates."""
