"""Evaluations that run from a checkout: `python -m eval SUBCOMMAND`."""
