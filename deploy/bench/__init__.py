"""`make bench`: what busway costs and gains, as ratios taken in turns in one run against a peer or a floor."""
