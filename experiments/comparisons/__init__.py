"""What `compare` and `compare_orders` are made of: tasks, runs, figures, pictures."""
