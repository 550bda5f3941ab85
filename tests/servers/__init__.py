"""Real servers for the tests, started from installed binaries on loopback and never left behind."""
