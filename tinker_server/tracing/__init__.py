"""One trace for each operation, from its submit until its result is stored."""
