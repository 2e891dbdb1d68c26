"""`calibjax compare`: recalibration methods side by side, and the winner to keep."""
