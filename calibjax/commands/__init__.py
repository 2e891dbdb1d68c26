"""The commands of `calibjax`: one file per command, named after it."""
