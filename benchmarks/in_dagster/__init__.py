"""What the plugin costs in Dagster: over a plain asset, against a run an item, and in a tick of its sensors."""
