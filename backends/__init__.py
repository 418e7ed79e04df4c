"""Training and sampling. Knows the wire types; knows neither HTTP nor the database."""
