"""When accepted operations run, and what each does."""
