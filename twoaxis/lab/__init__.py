"""The lab: trains, compares and reports, honestly.

- `text`: where tokens come from, how they are packed, what is held out
- `tasks`: diagnostic tasks, drawn as they are needed
- `training`: one run, its model, optimizer, schedule, checkpoints
- `comparing`: many runs as one comparison, its plan, budgets, controls, worker processes
- `reports`: what a comparison says, statistics, tables, plots, page

`spec`, `config`, `results`, `files`, `measure` and `own` are shared by all of them.
"""
