"""Programs that measure: `ordering`, `quotas`, `rounds` and `processes` print tables of figures."""
