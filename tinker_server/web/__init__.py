"""What HTTP needs around the routes: who calls, what a body is, what an error answers."""
