"""OmniRelay for Dagster: assets, ops and sensors that work from a durable lease queue.

The queue itself lives in `lease_core` and knows nothing of Dagster. This package is what a Dagster project imports:
it leases work for a run, keeps the leases alive while the run works, and completes them once the output is stored.
"""
