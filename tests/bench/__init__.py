"""Measurements for developers: `python -m tests.bench.NAME`. They print figures and assert nothing."""
