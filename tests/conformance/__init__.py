"""One suite for every database: what the queue promises, case by case, on SQLite file, SQLite memory and PostgreSQL."""
