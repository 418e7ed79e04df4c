"""The trainer: `client` is the server's side, `process` a child's, `rank` computes."""
