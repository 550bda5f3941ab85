"""The queue in the world as it is: forks and threads, full disks, lost connections, old schemas, paused processes."""
