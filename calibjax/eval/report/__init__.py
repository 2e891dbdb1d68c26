"""Tables in the terminal, figures, and a self-contained page, all drawn from `metrics.json`."""
