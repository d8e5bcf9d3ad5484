"""The study of example orders: what `compare_orders` runs, measures and tells.

`arms` are the orders, `tasks` says what a task is, `study` lists them. `schedule` finds out what is
missing and has it done by `jobs`: `runs` trains, `timing` and `herding` measure. `results` reads
what they left, and of that alone `report` is written: `figures` judges, `tables` and `pictures`
show, `page` puts it on paper.
"""
