"""The log as a Spark source, and governance on it."""
