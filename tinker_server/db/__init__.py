"""Tables and the engine behind them."""
