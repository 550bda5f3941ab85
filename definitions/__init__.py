"""The demo fabric: the one place that wires a queue, its Dagster resources and its assets together."""
