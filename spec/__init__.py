"""Specifications that are checked exhaustively: every order of every step, within bounds (`make spec`)."""
