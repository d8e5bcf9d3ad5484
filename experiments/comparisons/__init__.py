"""What `compare` is made of, and what the other comparisons share: spreads, ticks."""
