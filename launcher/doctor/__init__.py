"""Checks of nodes, their network and their collectives: is it the job, or is it the cluster?

`launcher doctor` submits a run of its own (`api/doctor.py`). On every node, start.sh executes `__main__.py`
before the ranks:

1. Each node measures itself: `on_node.measure_node`, with the functions of `measure/`.
2. Node 0 (`coordinator.py`) gives orders to all nodes, itself included: files in the run directory
   (`orders.py`). Every node carries them out (`on_node.py`) and answers there. Ranks of a test are processes
   of `measure/group.py`. What is ordered next depends on the answers; `settings.py` has what a search tries.
3. `heartbeat.py` tells node 0 which nodes have died meanwhile.

The answers are the results. `results.py` reads them, `interpret.py` and `outcome.py` turn them into measured
values, and the table in `checks/` judges each of them (`examine.py`). `page.py` shows the findings, and
`profile_change.py` writes what was found out into the profile.

In the run of an ordinary job only the first step is done: `checks: doctor`, and between two attempts.
"""
