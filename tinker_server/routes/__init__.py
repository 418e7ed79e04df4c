"""HTTP routes: parse a request, call a store or submit an operation, return a response."""
