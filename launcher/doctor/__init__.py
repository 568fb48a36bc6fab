"""Check nodes, their network and their collectives, to tell faults of the cluster from faults of the job.

`launcher doctor` submits its own run (`api/doctor.py`). On every node, start.sh executes `__main__.py` before
the ranks:

1. Each node measures itself: `on_node.measure_node`, with the functions of `measure/`.
2. Node 0 (`coordinator.py`) gives orders to all nodes, including itself, as files in the run directory
   (`order_files.py`). Every node carries them out (`on_node.py`) and writes its answer there. The ranks of
   a test are processes of `measure/group.py`. Each order depends on the answers so far; `settings.py` lists
   the settings that a search tries.
3. `heartbeat.py` tells node 0 which nodes have died.

The answers are the results. `results.py` reads them, `interpret.py` and `outcome.py` turn them into measured
values, and the table in `checks/` judges each value (`examine.py`). `page.py` shows the findings, and
`profile_change.py` writes them into the profile.

In the run of an ordinary job, only the first step is done: with `checks: doctor`, and between two attempts.
"""
