"""Rebuilding, verifying, snapshots and standbys."""
