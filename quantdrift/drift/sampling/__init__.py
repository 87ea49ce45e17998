"""How the replay budget is divided: strata, boosts and allocation."""
