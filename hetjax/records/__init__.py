"""What a run leaves behind, beside its checkpoints: lines, summary, report, and measurements.

`record` writes the files of a workdir, `summary` adds up the rounds, `evaluate` measures
between them. The reports of rounds go in; `metrics.jsonl`, `summary.json` and
`report.html` come out. Imports `rounds` and all below; no round imports it.
"""
