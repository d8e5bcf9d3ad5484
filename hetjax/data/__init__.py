"""Data: sources of examples, data sets by name, and the way from an order to microbatches."""
