"""Studies of calibration heads: one question each, answered by many heads on the same hidden states."""
