"""Who owns what is created here. Keys are not told apart, so everything has one owner, and every client is it."""

OWNER = "local"
