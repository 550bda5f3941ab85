"""Sinks, one file each. Libraries that only one of them needs are imported when that one is used."""
