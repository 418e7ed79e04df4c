"""HTTP around the routes: keys, dependencies, bodies, errors."""
