"""Find what is wrong with a plan before any rank starts: mistakes (plan.py), and what costs too much (cost.py)."""
