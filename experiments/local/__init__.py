"""The study of `experiments.compare_local`: its tasks and arms, how they are played, its report."""
