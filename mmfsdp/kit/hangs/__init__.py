"""Name a hang: which rank never entered which collective, of which unit, and what that rank does instead.

| step | file |
|---|---|
| each rank serves torch's flight recorder, the list of the collectives that it entered | rank_server.py |
| a process outside of the ranks asks them, and compares the lists | entered.py, compare.py |
| the missing collective is found in the order of the plan | order.py |
| the words | words.py, stacks.py |
| the same for a loop of one's own | own_loop.py |
"""
