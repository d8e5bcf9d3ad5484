"""What `train_bilevel` and `compare_bilevel` are made of: problems, outer loops, pictures.

`settings` has the fields of a cleaning run, `estimators` the methods by their names, `data` the
polluted images, `cleaning` the problem and its outer loop, `baselines` what it is compared with,
`page` its report. Imports hetjax alone; nothing in the package imports this.
"""
