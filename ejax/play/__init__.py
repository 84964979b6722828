"""Trained policies in use: act, watch, push and command them."""
