"""Real worker processes, killed with SIGKILL wherever it hurts, and an audit of what they left behind."""
